"""Paged attention on the host against the plain reference, over random steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch, KVGeometry, OperationInputError
from sglang_lite.adapters.cpu import CpuOperations
from tests.support.reference_operations import ReferenceOperations


@dataclass(frozen=True)
class Shape:
    """Extents of a random problem."""

    page_size: int = 4
    layers: int = 2
    heads: int = 6
    groups: int = 2
    head_dim: int = 8
    dtype: torch.dtype = torch.float32


class RandomSteps:
    """Runs the same steps on two implementations, each with its own pool, and compares what comes out.

    The pools start as NaN, so that a read of a slot that nobody wrote shows.
    """

    def __init__(self, ops: CpuOperations, shape: Shape, seed: int, num_pages: int = 200) -> None:
        self.ops, self.shape = ops, shape
        self.geometry = KVGeometry(num_pages, shape.page_size, shape.layers, shape.groups, shape.head_dim, shape.dtype)
        extents = (num_pages, shape.layers, 2, shape.page_size, shape.groups, shape.head_dim)
        self.pool = torch.full(extents, torch.nan, dtype=shape.dtype)
        self.reference_pool = self.pool.clone()
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.free = self.random.permutation(num_pages).tolist()

    def new_pages(self, num_tokens: int, pages: list[int]) -> None:
        while len(pages) * self.shape.page_size < num_tokens:
            pages.append(self.free.pop())

    def run(
        self,
        decode: list[tuple[int, list[int], int]],
        prefill: list[tuple[int, list[int], int, int]] = (),  # type: ignore[assignment]
        *,
        window: int | None = None,
        with_rows: bool = True,
        tolerance: float = 2e-6,
        sinks: dict[int, Tensor] | None = None,
        verify: list[tuple[int, list[int], int, int]] = (),  # type: ignore[assignment]
    ) -> None:
        """decode: (row, pages, length after); prefill, verify: (row, pages, length after, chunk); sinks: by layer."""
        chunks = [(row, pages, length, 1) for row, pages, length in decode] + [*verify, *prefill]
        slots: list[int] = []
        size = self.shape.page_size
        for _, pages, length, count in chunks:
            self.new_pages(length, pages)
            slots += [pages[p // size] * size + p % size for p in range(length - count, length)]
        table = torch.zeros(len(chunks), max(-(-length // size) for _, _, length, _ in chunks), dtype=torch.int64)
        for index, (_, pages, length, _) in enumerate(chunks):
            table[index, : -(-length // size)] = torch.tensor(pages[: -(-length // size)])
        batch = AttentionBatch(
            num_decode=len(decode),
            query_lens=[count for *_, count in chunks],
            kv_lens=[length for _, _, length, _ in chunks],
            slot_mapping=torch.tensor(slots),
            page_table=table,
            rows=np.array([row for row, *_ in chunks], dtype=np.int32) if with_rows else None,
            num_verify=len(verify),
        )
        plan = self.ops.plan_attention(batch, self.geometry)
        reference = ReferenceOperations()
        reference_plan = reference.plan_attention(batch, self.geometry)
        for layer in range(self.shape.layers):
            query, key, value = self._inputs(len(slots))
            options = {
                "scale": self.shape.head_dim**-0.5,
                "sliding_window": window,
                "sinks": (sinks or {}).get(layer),
            }
            expected = reference.attention(query, key, value, self.reference_pool, layer, reference_plan, **options)
            actual = self.ops.attention(query, key, value, self.pool, layer, plan, **options)
            torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(self.pool, self.reference_pool, equal_nan=True, atol=0, rtol=0)

    def _inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        total = shape.heads + 2 * shape.groups
        merged = torch.randn(tokens, total, shape.head_dim, generator=self.generator).to(shape.dtype)
        query, key, value = merged.split([shape.heads, shape.groups, shape.groups], 1)
        return query, key, value


WORKSPACES = pytest.mark.parametrize("workspace_bytes", [0, 1 << 20], ids=["pool", "workspace"])


@WORKSPACES
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(page_size=1),
        Shape(page_size=16, heads=9, groups=3, head_dim=64),
        Shape(heads=4, groups=4, head_dim=16),
        Shape(heads=4, groups=1),
        Shape(dtype=torch.bfloat16),
    ],
    ids=["grouped", "page 1", "smollm2", "multi-head", "multi-query", "bfloat16"],
)
def test_mixed_steps(shape: Shape, window: int | None, workspace_bytes: int) -> None:
    """Sequences of several lengths: prefill in chunks, then decode beside other prefills."""
    steps = RandomSteps(CpuOperations(workspace_bytes=workspace_bytes), shape, seed=3)
    tolerance = 2e-2 if shape.dtype == torch.bfloat16 else 2e-6
    first: list[int] = []
    second: list[int] = []
    third: list[int] = []
    steps.run([], [(0, first, 7, 7), (1, second, 13, 13)], window=window, tolerance=tolerance)
    steps.run([(1, second, 14), (0, first, 8)], [(2, third, 5, 5)], window=window, tolerance=tolerance)
    steps.run([(0, first, 9), (1, second, 15)], [(2, third, 12, 7)], window=window, tolerance=tolerance)
    for index in range(20):
        steps.run(
            [(0, first, 10 + index), (2, third, 13 + index), (1, second, 16 + index)],
            window=window,
            tolerance=tolerance,
        )


@pytest.mark.parametrize("window", [None, 5])
def test_a_row_alone_in_any_slot(window: int | None) -> None:
    """One client: its row decodes alone, after others have left; its keys and values take the short way."""
    shape = Shape(heads=9, groups=3, head_dim=64)
    steps = RandomSteps(CpuOperations(workspace_bytes=1 << 22), shape, seed=8)
    first: list[int] = []
    second: list[int] = []
    steps.run([], [(0, first, 7, 7), (1, second, 13, 13)], window=window)
    steps.run([(0, first, 8), (1, second, 14)], window=window)
    for length in range(15, 24):
        steps.run([(1, second, length)], window=window)
    steps.run([(1, second, 24)], [(0, first, 12, 4)], window=window)


@pytest.mark.parametrize("workspace_bytes", [0, 20_000, 1 << 20], ids=["pool", "tight", "workspace"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shape", [Shape(heads=6, groups=2), Shape(dtype=torch.bfloat16)], ids=["float32", "bfloat16"])
def test_rows_that_verify_guesses(shape: Shape, window: int | None, workspace_bytes: int) -> None:
    """Several queries of a row at once; some of their tokens are taken back, and the next step writes over them."""
    tolerance = 2e-2 if shape.dtype == torch.bfloat16 else 2e-6
    steps = RandomSteps(CpuOperations(workspace_bytes=workspace_bytes), shape, seed=10)
    options: dict[str, Any] = {"window": window, "tolerance": tolerance}
    pages: list[list[int]] = [[], [], [], []]
    steps.run([], [(row, pages[row], 5 + 4 * row, 5 + 4 * row) for row in range(3)], **options)
    lengths = [5, 9, 13]
    for fed, kept in (((1, 3, 4), (1, 2, 4)), ((1, 1, 4), (1, 1, 1)), ((1, 2, 2), (1, 2, 1)), ((1, 1, 1), (1, 1, 1))):
        stops = [length + count for length, count in zip(lengths, fed, strict=True)]
        plain = [(row, pages[row], stops[row]) for row in range(3) if fed[row] == 1]
        several = [(row, pages[row], stops[row], fed[row]) for row in range(3) if fed[row] > 1]
        steps.run(plain, verify=several, **options)
        lengths = [length + count for length, count in zip(lengths, kept, strict=True)]
    several = [(row, pages[row], lengths[row] + 2, 2) for row in range(3)]
    steps.run([], [(3, pages[3], 6, 6)], verify=several, **options)


def test_rows_behind_one_prefix_verify_guesses() -> None:
    shape = Shape(page_size=16, heads=4, groups=2)
    steps = RandomSteps(CpuOperations(workspace_bytes=8 << 20), shape, seed=11)
    shared: list[int] = []
    steps.run([], [(0, shared, 320, 320)])
    pages = [[*shared] for _ in range(4)]
    for row in range(4):
        steps.run([], [(row, pages[row], 323 + row, 3 + row)])
    for index in range(3):
        several = [(row, pages[row], 325 + row + 2 * index, 2) for row in range(1, 4)]
        steps.run([(0, pages[0], 324 + index)], verify=several)


@WORKSPACES
@pytest.mark.parametrize("with_sinks", [0, 1], ids=["first", "last"])
def test_layers_with_and_without_sinks_decode_together(with_sinks: int, workspace_bytes: int) -> None:
    """Layers that read the pool and layers that read copies: every token reaches the pool, whoever writes it."""
    shape = Shape(layers=2)
    sinks = {with_sinks: torch.randn(shape.heads)}
    steps = RandomSteps(CpuOperations(workspace_bytes=workspace_bytes), shape, seed=9)
    first: list[int] = []
    second: list[int] = []
    steps.run([], [(0, first, 7, 7), (1, second, 13, 13)], sinks=sinks)
    for index in range(6):
        steps.run([(1, second, 14 + index), (0, first, 8 + index)], sinks=sinks)


@WORKSPACES
def test_rows_without_identity(workspace_bytes: int) -> None:
    steps = RandomSteps(CpuOperations(workspace_bytes=workspace_bytes), Shape(), seed=4)
    pages: list[int] = []
    steps.run([], [(0, pages, 6, 6)], with_rows=False)
    for length in range(7, 12):
        steps.run([(0, pages, length)], with_rows=False)


@WORKSPACES
def test_shared_prefix(workspace_bytes: int) -> None:
    """Rows that start with the same pages, of different lengths behind them, coming and going."""
    steps = RandomSteps(CpuOperations(workspace_bytes=workspace_bytes), Shape(page_size=16), seed=5)
    prompt: list[int] = []
    steps.run([], [(0, prompt, 160, 160)])
    rows = [list(prompt) for _ in range(5)]
    lengths = [160 + 3 * index for index in range(5)]
    for row, pages in enumerate(rows):
        if lengths[row] > 160:
            steps.run([], [(row, pages, lengths[row], lengths[row] - 160)])
        else:
            del pages[10:]
    lone: list[int] = []
    steps.run([], [(7, lone, 20, 20)])
    lone_length = 20
    for step in range(12):
        active = [row for row in range(5) if not (step > 5 and row == 1) and not (step < 4 and row == 4)]
        lone_length += 1
        for row in active:
            lengths[row] += 1
        steps.run([(row, rows[row], lengths[row]) for row in active] + [(7, lone, lone_length)])


@pytest.mark.parametrize("slots", [[], [3, 800], [-1]])
def test_slots_outside_the_pool_are_refused(slots: list[int]) -> None:
    ops = CpuOperations()
    batch = AttentionBatch(
        num_decode=len(slots),
        query_lens=[1] * len(slots),
        kv_lens=[1] * len(slots),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        page_table=torch.zeros(len(slots), 1, dtype=torch.int64),
    )
    with pytest.raises(OperationInputError, match="slot_mapping"):
        ops.plan_attention(batch, KVGeometry(200, 4, 2, 2, 8, torch.float32))


@pytest.mark.parametrize("window", [None, 30])
def test_chunks_behind_one_prefix(window: int | None) -> None:
    """Chunks that share a prefix, others that do not, and a prefix that ends within a page."""
    steps = RandomSteps(CpuOperations(), Shape(), seed=6)
    prompt: list[int] = []
    steps.run([], [(0, prompt, 24, 24)], window=window)
    first, second, other = prompt[:5], prompt[:5], prompt[:4]
    steps.run([], [(1, first, 27, 7), (3, other, 18, 2), (2, second, 33, 13)], window=window)
    steps.run([(1, first, 28)], [(4, [], 9, 9), (0, prompt, 29, 5), (5, [], 3, 3)], window=window)


@pytest.mark.parametrize("workspace_bytes", [0, 150_000, 8 << 20], ids=["pool", "tight", "ample"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_lives(workspace_bytes: int, seed: int) -> None:
    """Sequences come, decode, pause, leave and share prefixes in random order; rows are used again."""
    steps = RandomSteps(CpuOperations(workspace_bytes=workspace_bytes), Shape(page_size=16, layers=1), seed, 2000)
    random = steps.random
    prompt: list[int] = []
    steps.run([], [(15, prompt, 320, 320)])
    live: dict[int, tuple[list[int], int]] = {}
    for _ in range(50):
        idle = [row for row in range(12) if row not in live]
        prefill: list[tuple[int, list[int], int, int]] = []
        for row in random.permutation(idle)[: random.integers(0, 3)].tolist():
            shared = int(random.choice([0, 0, 10, 18, 20])) * 16
            chunk = int(random.integers(1, 90))
            prefill.append((row, prompt[: shared // 16], shared + chunk, chunk))
        decoding = [row for row in live if random.random() < 0.9]
        decode = [(row, live[row][0], live[row][1] + 1) for row in decoding]
        if decode or prefill:
            steps.run(decode, prefill)
        live.update({row: (pages, length) for row, pages, length in decode})
        live.update({row: (pages, length) for row, pages, length, _ in prefill})
        for row in [row for row in live if random.random() < 0.08]:
            del live[row]
