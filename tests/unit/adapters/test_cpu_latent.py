"""Latent attention on the host equals the plain form, absorbed or expanded, over any pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch, KVGeometry, OperationInputError
from sglang_lite.adapters.cpu import CpuOperations, latent_attention, latent_plan
from sglang_lite.adapters.latent import KeySelection
from tests.support.reference_operations import ReferenceOperations

HEADS, NOPE, ROPE, VALUE, LAYERS = 3, 12, 4, 10, 2


@dataclass(frozen=True, slots=True)
class Step:
    """A batch and what its tokens bring."""

    batch: AttentionBatch
    query_nope: Tensor
    query_rope: Tensor
    rows: Tensor
    selection: KeySelection | None


class World:
    """A pool whose unwritten slots hold NaN, sequences with random pasts, and both implementations."""

    def __init__(
        self,
        page_size: int,
        latent: int = 16,
        index: int = 0,
        top_k: int = 6,
        dtype: torch.dtype = torch.float32,
        num_pages: int = 256,
    ) -> None:
        torch.manual_seed(page_size + latent)
        self.page_size, self.index, self.top_k = page_size, index, top_k
        width = latent + ROPE + index
        self.geometry = KVGeometry(num_pages, page_size, LAYERS, 1, width, dtype, num_tensors=1, latent_width=latent)
        self.pool = torch.full(self.geometry.pool_shape, float("nan"), dtype=dtype)
        self.dtype = dtype
        self.weight = (torch.randn(HEADS * (NOPE + VALUE), latent) * latent**-0.5).to(dtype)
        self.cpu = CpuOperations(measure=False)
        self._free = torch.randperm(num_pages).tolist()

    def step(self, decode: list[int], chunks: list[tuple[int, int]]) -> Step:
        """Sequences with pasts of ``decode`` lengths and one new token, then chunks of (past, new tokens)."""
        pasts = decode + [past for past, _ in chunks]
        query_lens = [1] * len(decode) + [new for _, new in chunks]
        kv_lens = [past + new for past, new in zip(pasts, query_lens, strict=True)]
        size = self.page_size
        table = torch.zeros(len(pasts), -(-max(kv_lens) // size), dtype=torch.int64)
        slots = []
        for row, (past, kv_len) in enumerate(zip(pasts, kv_lens, strict=True)):
            pages = [self._free.pop() for _ in range(-(-kv_len // size))]
            table[row, : len(pages)] = torch.tensor(pages)
            where = [pages[position // size] * size + position % size for position in range(kv_len)]
            for slot in where[:past]:
                self.pool[slot // size, :, 0, slot % size, 0] = torch.randn(LAYERS, self.geometry.head_dim)
            slots += where[past:]
        tokens = len(slots)
        selection = None
        if self.index:
            weights = torch.randn(tokens, 8)  # so many heads that no two scores are equal (all of them cut to 0)
            selection = KeySelection(torch.randn(tokens, 8, self.index).to(self.dtype), weights, self.top_k)
        query = torch.randn(tokens, HEADS, NOPE + ROPE).to(self.dtype)
        return Step(
            AttentionBatch(len(decode), query_lens, kv_lens, torch.tensor(slots), table),
            query[..., :NOPE],
            query[..., NOPE:],
            torch.randn(tokens, self.geometry.head_dim).to(self.dtype),
            selection,
        )

    def check(self, step: Step, tolerance: float = 1e-5) -> None:
        """Every layer of a step: the same result, and the same pool afterwards."""
        plain = ReferenceOperations()
        expected_pool = self.pool.clone()
        plan, expected_plan = (ops.plan_attention(step.batch, self.geometry) for ops in (self.cpu, plain))
        for layer in range(LAYERS):
            results = []
            for ops, pool, this in ((self.cpu, self.pool, plan), (plain, expected_pool, expected_plan)):
                projection = ops.latent.pack_projection(self.weight, HEADS, NOPE)
                results.append(
                    ops.latent.attention(
                        step.query_nope,
                        step.query_rope,
                        step.rows,
                        projection,
                        pool,
                        layer,
                        this,
                        scale=0.3,
                        selection=step.selection,
                    )
                )
            assert results[0].shape == (len(step.rows), HEADS * VALUE) and results[0].dtype == self.dtype
            torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)
            assert torch.equal(self.pool.nan_to_num(9.0), expected_pool.nan_to_num(9.0))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("index", [0, 8])
class TestEqualsThePlainForm:
    """``index``: width of the index key of models that select keys."""

    def test_decode_rows_of_different_lengths(self, page_size: int, index: int) -> None:
        world = World(page_size, index=index)
        world.check(world.step([3, 16, 30, 7, 15], []))

    def test_decode_rows_in_several_tiles_sorted_by_length(
        self, page_size: int, index: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(latent_plan, "TILE_BYTES", 4000)
        world = World(page_size, index=index)
        step = world.step([2, 33, 3, 40, 1, 5], [])
        plan = world.cpu.plan_attention(step.batch, world.geometry)
        assert isinstance(plan, latent_plan.CpuLatentPlan)
        assert len(plan.tiles) > 1 and plan.order is not None
        world.check(step)

    def test_chunks_with_and_without_a_past(self, page_size: int, index: int) -> None:
        world = World(page_size, index=index)
        world.check(world.step([], [(0, 9), (17, 5), (4, 1), (16, 16)]))

    def test_decode_rows_and_chunks_in_one_step(self, page_size: int, index: int) -> None:
        world = World(page_size, index=index)
        world.check(world.step([8, 21], [(0, 5), (12, 20)]))


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("index", [0, 8])
def test_heads_and_queries_that_take_turns(expand: bool, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads expanded at a time, and a choice of keys made for a few queries at a time."""
    monkeypatch.setattr(latent_attention, "_expanding_pays", lambda *_: expand)
    monkeypatch.setattr(latent_attention, "_EXPANDED_ELEMENTS", 2 * 30 * 2 * (NOPE + ROPE))
    monkeypatch.setattr(latent_attention, "_MASK_ELEMENTS", 150)
    world = World(4, index=index)
    world.check(world.step([], [(0, 30), (17, 13), (2, 28)]))


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("index", [0, 8])
def test_absorbed_and_expanded_chunks_are_the_same(expand: bool, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention, "_expanding_pays", lambda *_: expand)
    world = World(4, index=index)
    world.check(world.step([], [(0, 30), (25, 13), (40, 1)]))


@pytest.mark.parametrize(
    ("latent", "past", "length", "expands"), [(128, 100, 3, False), (128, 0, 150, True), (4, 0, 9, False)]
)
def test_expanding_is_chosen_where_it_is_less_work(latent: int, past: int, length: int, expands: bool) -> None:
    """Long chunks expand a wide latent; short ones behind a long past do not, nor any with a narrow one."""
    chosen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_absorbed", "_expanded"):
            patch.setattr(latent_attention, name, recording(getattr(latent_attention, name), name, chosen))
        world = World(16, latent=latent)
        world.check(world.step([], [(past, length)]), tolerance=1e-4)
    assert chosen == ["_expanded" if expands else "_absorbed"] * LAYERS


def recording(function: Callable[..., Tensor], name: str, calls: list[str]) -> Callable[..., Tensor]:
    """The function, noting its calls."""

    def call(*arguments: object) -> Tensor:
        calls.append(name)
        return function(*arguments)

    return call


def test_bfloat16_stays_near() -> None:
    world = World(4, dtype=torch.bfloat16)
    world.check(world.step([5, 20], [(0, 9), (11, 6)]), tolerance=0.05)


def test_a_pool_of_another_type_is_converted() -> None:
    world = World(4, dtype=torch.bfloat16)
    step = world.step([5], [(3, 4)])
    world.dtype, world.weight = torch.float32, world.weight.float()
    step = Step(step.batch, step.query_nope.float(), step.query_rope.float(), step.rows.float(), None)
    world.check(step, tolerance=1e-4)


def test_a_plan_reads_the_pool_it_was_made_for() -> None:
    """Another pool is planned for between a step's plan and its run."""
    world, other = World(4), World(16)
    step = world.step([9], [(6, 5)])
    plan = world.cpu.plan_attention(step.batch, world.geometry)
    world.cpu.plan_attention(other.step([3], []).batch, other.geometry)
    projection = world.cpu.latent.pack_projection(world.weight, HEADS, NOPE)
    arguments = (step.query_nope, step.query_rope, step.rows, projection, world.pool, 0)
    first = world.cpu.latent.attention(*arguments, plan, scale=0.3)
    again = world.cpu.plan_attention(step.batch, world.geometry)
    assert torch.equal(first, world.cpu.latent.attention(*arguments, again, scale=0.3))


def test_slots_outside_the_pool_and_plans_of_other_pools_are_refused() -> None:
    world = World(4)
    step = world.step([5], [])
    step.batch.slot_mapping[0] = 4 * 256
    with pytest.raises(OperationInputError, match=r"slot_mapping\[0\] is 1024"):
        world.cpu.plan_attention(step.batch, world.geometry)
    step.batch.slot_mapping[0] = 3
    plan = world.cpu.plan_attention(step.batch, KVGeometry(256, 4, LAYERS, 1, 20, torch.float32))
    projection = world.cpu.latent.pack_projection(world.weight, HEADS, NOPE)
    with pytest.raises(OperationInputError, match="pool of latent rows"):
        world.cpu.latent.attention(
            step.query_nope, step.query_rope, step.rows, projection, world.pool, 0, plan, scale=1.0
        )
