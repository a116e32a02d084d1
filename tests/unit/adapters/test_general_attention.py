"""Attention with sinks and capped scores on the host against the plain reference, over mixed steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch, KVGeometry
from sglang_lite.adapters.cpu import CpuOperations, general_attention
from tests.support.reference_operations import ReferenceOperations

HEADS, GROUPS, HEAD_DIM, LAYERS = 6, 2, 8, 2
SINKS = torch.linspace(-2.0, 3.0, HEADS)
NUM_PAGES = 128

Row = tuple[int, int]
"""Length after the step and queries in it."""


def batch_of(rows: list[Row], page_size: int, seed: int) -> AttentionBatch:
    """Rows with one query are decode rows and come first. Pages lie anywhere in the pool."""
    free = np.random.default_rng(seed).permutation(NUM_PAGES).tolist()
    pages = [[free.pop() for _ in range(-(-length // page_size))] for length, _ in rows]
    table = torch.zeros(len(rows), max(len(row) for row in pages), dtype=torch.int64)
    for index, row in enumerate(pages):
        table[index, : len(row)] = torch.tensor(row)
    slots = [
        pages[index][position // page_size] * page_size + position % page_size
        for index, (length, count) in enumerate(rows)
        for position in range(length - count, length)
    ]
    return AttentionBatch(
        num_decode=sum(count == 1 for _, count in rows),
        query_lens=[count for _, count in rows],
        kv_lens=[length for length, _ in rows],
        slot_mapping=torch.tensor(slots),
        page_table=table,
        rows=np.arange(len(rows), dtype=np.int32),
    )


def compare(
    ops: CpuOperations,
    rows: list[Row],
    page_size: int,
    *,
    window: int | None,
    sinks: Tensor | None,
    logit_cap: float | None,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 3e-6,
) -> None:
    """One step on the host and in the reference. Slots of the pool that hold no token are NaN."""
    batch, geometry = (
        batch_of(rows, page_size, seed=3),
        KVGeometry(NUM_PAGES, page_size, LAYERS, GROUPS, HEAD_DIM, dtype),
    )
    generator = torch.Generator().manual_seed(5)
    pool = torch.full(geometry.pool_shape, torch.nan, dtype=dtype)
    for row, (length, count) in enumerate(rows):
        for position in range(length - count):
            page = int(batch.page_table[row, position // page_size])
            before = torch.randn(LAYERS, 2, GROUPS, HEAD_DIM, generator=generator)
            pool[page, :, :, position % page_size] = before.to(dtype)
    expected_pool = pool.clone()
    reference = ReferenceOperations()
    plan, reference_plan = ops.plan_attention(batch, geometry), reference.plan_attention(batch, geometry)
    merged = torch.randn(len(batch.slot_mapping), HEADS + 2 * GROUPS, HEAD_DIM, generator=generator).to(dtype) * 2
    query, key, value = merged.split([HEADS, GROUPS, GROUPS], 1)
    for layer in range(LAYERS):
        options = {"scale": 0.5, "sliding_window": window, "sinks": sinks, "logit_cap": logit_cap}
        actual = ops.attention(query, key, value, pool, layer, plan, **options)
        expected = reference.attention(query, key, value, expected_pool, layer, reference_plan, **options)
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(pool, expected_pool, equal_nan=True, atol=0, rtol=0)


OPTIONS = pytest.mark.parametrize(
    ("sinks", "logit_cap"), [(SINKS, None), (None, 3.0), (SINKS, 3.0)], ids=["sinks", "cap", "both"]
)


@OPTIONS
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1)],
        [(17, 1), (3, 1), (40, 1), (9, 1)],
        [(12, 12)],
        [(23, 7), (5, 5)],
        [(31, 1), (4, 1), (20, 4), (16, 16)],
    ],
    ids=["first", "decode", "prompt", "chunks", "mixed"],
)
def test_equals_the_reference(
    rows: list[Row], page_size: int, window: int | None, sinks: Tensor | None, logit_cap: float | None
) -> None:
    compare(CpuOperations(), rows, page_size, window=window, sinks=sinks, logit_cap=logit_cap)


@OPTIONS
def test_long_work_is_cut_into_parts(
    monkeypatch: pytest.MonkeyPatch, sinks: Tensor | None, logit_cap: float | None
) -> None:
    monkeypatch.setattr(general_attention, "_TILE_BYTES", 3000)
    monkeypatch.setattr(general_attention, "_CAPPED_QUERIES", 3)
    rows = [(30, 1), (7, 1), (45, 1), (2, 1), (26, 11)]
    compare(CpuOperations(), rows, 4, window=None, sinks=sinks, logit_cap=logit_cap)


def test_a_pool_of_another_type_than_the_queries() -> None:
    ops = CpuOperations(workspace_bytes=1 << 20)
    rows = [(17, 1), (20, 4)]
    compare(ops, rows, 4, window=5, sinks=SINKS, logit_cap=None, dtype=torch.bfloat16, tolerance=3e-2)


def test_plain_layers_and_layers_with_sinks_share_a_step() -> None:
    """The copies that plain decode keeps stay right when other layers of the same step read the pool."""
    ops, reference = CpuOperations(workspace_bytes=1 << 20), ReferenceOperations()
    geometry = KVGeometry(NUM_PAGES, 4, LAYERS, GROUPS, HEAD_DIM, torch.float32)
    pool = torch.full(geometry.pool_shape, torch.nan)
    expected_pool = pool.clone()
    generator = torch.Generator().manual_seed(1)
    for length, count in [(9, 9), (10, 1), (11, 1), (12, 1), (13, 1)]:
        batch = batch_of([(length, count)], 4, seed=3)
        plans = ops.plan_attention(batch, geometry), reference.plan_attention(batch, geometry)
        for layer, sinks in enumerate((None, SINKS)):
            query = torch.randn(count, HEADS, HEAD_DIM, generator=generator)
            key, value = torch.randn(2, count, GROUPS, HEAD_DIM, generator=generator)
            actual = ops.attention(
                query, key, value, pool, layer, plans[0], scale=1.0, sliding_window=None, sinks=sinks
            )
            expected = reference.attention(
                query, key, value, expected_pool, layer, plans[1], scale=1.0, sliding_window=None, sinks=sinks
            )
            torch.testing.assert_close(actual, expected, atol=3e-6, rtol=3e-6)


def test_a_large_sink_takes_all_the_weight_and_a_small_one_none() -> None:
    for sink, share in ((60.0, 0.0), (-60.0, 1.0), (0.0, 1 / 2)):
        batch = batch_of([(1, 1)], 4, seed=3)
        ops = CpuOperations()
        geometry = KVGeometry(NUM_PAGES, 4, LAYERS, GROUPS, HEAD_DIM, torch.float32)
        value = torch.ones(1, GROUPS, HEAD_DIM)
        nothing = torch.zeros(1, HEADS, HEAD_DIM)
        mixed = ops.attention(
            nothing,
            torch.zeros_like(value),
            value,
            torch.zeros(geometry.pool_shape),
            0,
            ops.plan_attention(batch, geometry),
            scale=1.0,
            sliding_window=None,
            sinks=torch.full((HEADS,), sink),
        )
        assert mixed.tolist() == [[pytest.approx(share, abs=1e-6)] * (HEADS * HEAD_DIM)]


def test_the_log_sum_is_that_of_capped_scores() -> None:
    query, key = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 100.0]).view(1, 1, 2, 1)
    value = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    output, log_sum = general_attention.attend_capped(query, key, value, 1.0, torch.zeros(1, 1, 1, 2), 2.0)
    scores = [2 * math.tanh(0.5), 2.0]
    total = sum(math.exp(score) for score in scores)
    assert log_sum.item() == pytest.approx(math.log(total))
    assert output.item() == pytest.approx(math.exp(2.0) / total)
