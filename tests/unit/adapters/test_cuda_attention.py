"""Paged attention through the kernel wheels' doubles against the plain reference, over random steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch, KVGeometry, OperationInputError
from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.adapters.cuda.providers import DenseProviders
from tests.support.kernel_doubles import HOPPER, installed_kernels
from tests.support.kernel_doubles.checks import KernelError
from tests.support.reference_operations import ReferenceOperations

PAGE_SIZE, NUM_PAGES, LAYERS, HEADS, GROUPS, DIM = 4, 60, 2, 6, 2, 16
CHUNKS = {
    "decode": [(1, 5), (1, 1), (1, 9), (1, 4)],
    "prefill": [(3, 3), (5, 12), (1, 1)],
    "mixed": [(1, 8), (1, 13), (6, 6), (2, 11), (1, 5)],
}
NUM_DECODE = {"decode": 4, "prefill": 0, "mixed": 2}


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with installed_kernels():
        yield


def operations(**providers: str) -> CudaOperations:
    return CudaOperations(torch.device("cpu"), HOPPER, providers=DenseProviders(**providers), workspace_bytes=64)  # type: ignore[arg-type]


def random_batch(chunks: list[tuple[int, int]], num_decode: int, seed: int = 0) -> AttentionBatch:
    """(query tokens, tokens afterwards) a row, over pages in no order."""
    free = np.random.default_rng(seed).permutation(NUM_PAGES).tolist()
    width = max(-(-length // PAGE_SIZE) for _, length in chunks) + 1
    table = torch.full((len(chunks), width), NUM_PAGES + 5)  # entries past a row's length must not be looked at
    slots: list[int] = []
    for row, (count, length) in enumerate(chunks):
        pages = [free.pop() for _ in range(-(-length // PAGE_SIZE))]
        table[row, : len(pages)] = torch.tensor(pages)
        slots += [pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(length - count, length)]
    return AttentionBatch(
        num_decode=num_decode,
        query_lens=[count for count, _ in chunks],
        kv_lens=[length for _, length in chunks],
        slot_mapping=torch.tensor(slots),
        page_table=table,
    )


def geometry(dtype: torch.dtype = torch.bfloat16) -> KVGeometry:
    return KVGeometry(NUM_PAGES, PAGE_SIZE, LAYERS, GROUPS, DIM, dtype)


def filled_pool(batch: AttentionBatch, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """NaN but where the tokens before the step have their keys and values."""
    pool = torch.full(geometry().pool_shape, torch.nan)
    for row, (count, length) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
        for position in range(length - count):
            page = int(batch.page_table[row, position // PAGE_SIZE])
            pool[page, :, :, position % PAGE_SIZE] = torch.randn(LAYERS, 2, GROUPS, DIM, generator=generator)
    return pool.to(dtype)


def qkv(num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbouring views of one projection, as a model passes them."""
    heads = torch.randn(num_tokens, HEADS + 2 * GROUPS, DIM, generator=generator).bfloat16()
    query, key, value = heads.split_with_sizes([HEADS, GROUPS, GROUPS], 1)
    return query, key, value


@pytest.mark.parametrize("kind", sorted(CHUNKS))
@pytest.mark.parametrize(
    ("window", "cap", "sinks"), [(None, None, False), (3, None, False), (None, 5.0, False), (6, None, True)]
)
def test_equals_the_reference(kind: str, window: int | None, cap: float | None, sinks: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = random_batch(CHUNKS[kind], NUM_DECODE[kind])
    pool = filled_pool(batch, generator)
    reference_pool = pool.clone()
    ops, reference = operations(), ReferenceOperations()
    plan, reference_plan = ops.plan_attention(batch, geometry()), reference.plan_attention(batch, geometry())
    extra = {
        "scale": 0.3,
        "sliding_window": window,
        "logit_cap": cap,
        "sinks": torch.randn(HEADS, generator=generator) if sinks else None,
    }
    for layer in range(LAYERS):
        query, key, value = qkv(sum(batch.query_lens), generator)
        got = ops.attention(query, key, value, pool, layer, plan, **extra)  # type: ignore[arg-type]
        expected = reference.attention(query, key, value, reference_pool, layer, reference_plan, **extra)  # type: ignore[arg-type]
        torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(pool, reference_pool, equal_nan=True, atol=0, rtol=0)


def test_layers_of_two_kinds_are_planned_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on everything is planned before the first layer."""
    from tests.support.kernel_doubles.paged import BatchDecodeWithPagedKVCacheWrapper

    plans: list[int] = []
    real = BatchDecodeWithPagedKVCacheWrapper.plan
    monkeypatch.setattr(
        BatchDecodeWithPagedKVCacheWrapper,
        "plan",
        lambda self, *args, **kwargs: (plans.append(kwargs["window_left"]), real(self, *args, **kwargs)),
    )
    generator = torch.Generator().manual_seed(2)
    batch = random_batch(CHUNKS["decode"], 4)
    pool, ops = filled_pool(batch, generator), operations()
    for _ in range(2):
        plan = ops.plan_attention(batch, geometry())
        plans_before_layers = len(plans)
        for layer, window in ((0, None), (1, 3), (0, None), (1, 3)):
            ops.attention(*qkv(4, generator), pool, layer, plan, scale=0.3, sliding_window=window)
    assert plans == [-1, 2, -1, 2]
    assert plans_before_layers == 4


def test_eight_bit_keys_and_values() -> None:
    generator = torch.Generator().manual_seed(3)
    batch = random_batch(CHUNKS["mixed"], 2)
    pool = filled_pool(batch, generator, torch.float8_e4m3fn)
    ops, reference = operations(prefill_backend="fa3"), ReferenceOperations()
    wide = geometry(torch.float8_e4m3fn)
    query, key, value = qkv(sum(batch.query_lens), generator)
    got = ops.attention(query, key, value, pool, 0, ops.plan_attention(batch, wide), scale=0.25, sliding_window=None)
    rounded = pool.float()
    key, value = key.to(torch.float8_e4m3fn).float(), value.to(torch.float8_e4m3fn).float()
    expected = reference.attention(
        query.float(), key, value, rounded, 0, reference.plan_attention(batch, wide), scale=0.25, sliding_window=None
    )
    torch.testing.assert_close(got.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_lens": [2, 1, 1, 1]}, "exactly one query token"),
        ({"kv_lens": [5, 0, 9, 4]}, "no more than its sequence"),
        ({"kv_lens": [5, 1, 90, 4]}, "pages and the page table"),
        ({"kv_lens": [5, 1, 9]}, "must be equal"),
    ],
)
def test_contradictory_batches_are_refused(change: dict[str, list[int]], message: str) -> None:
    from dataclasses import replace

    batch = replace(random_batch(CHUNKS["decode"], 4), **change)  # type: ignore[arg-type]
    with pytest.raises(OperationInputError, match=message):
        operations().plan_attention(batch, geometry())


def test_sinks_with_a_logit_cap_are_refused() -> None:
    generator = torch.Generator().manual_seed(4)
    batch = random_batch(CHUNKS["decode"], 4)
    pool, ops = filled_pool(batch, generator), operations()
    plan = ops.plan_attention(batch, geometry())
    with pytest.raises(OperationInputError, match="no kernel of the wheels does both"):
        ops.attention(
            *qkv(4, generator), pool, 0, plan, scale=1.0, sliding_window=None, sinks=torch.zeros(HEADS), logit_cap=3.0
        )


def test_the_doubles_notice_broken_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be silent corruption on a device ends a test."""
    from sglang_lite.adapters.cuda import paging

    real = paging._fill_rows

    def shifted(step: paging.PagedStep, *args: object) -> None:
        real(step, *args)  # type: ignore[arg-type]
        step.last_page_len.array[0] = 0

    monkeypatch.setattr(paging, "_fill_rows", shifted)
    generator = torch.Generator().manual_seed(5)
    batch = random_batch(CHUNKS["decode"], 4)
    ops = operations()
    with pytest.raises(KernelError, match="last page lengths"):
        ops.attention(
            *qkv(4, generator),
            filled_pool(batch, generator),
            0,
            ops.plan_attention(batch, geometry()),
            scale=1.0,
            sliding_window=None,
        )
