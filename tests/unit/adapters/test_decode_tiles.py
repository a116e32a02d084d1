"""Decode rows are read a bounded number of pages at a time, whatever their order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.adapters.base import AttentionBatch, KVGeometry
from sglang_lite.adapters.cpu import CpuOperations, general_attention, latent_plan, paged_decode
from sglang_lite.adapters.cpu.pool_view import PoolReader
from sglang_lite.adapters.cpu.tiles import tile_stop


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(0, 200))
def test_tiles_cover_all_rows_and_hold_no_more_than_they_may(pages: list[int], most: int) -> None:
    num_pages = np.array(pages, dtype=np.int64)
    start = 0
    while start < len(pages):
        stop = tile_stop(num_pages, start, most)
        tile = pages[start:stop]
        assert len(tile) == 1 or len(tile) * max(tile) <= most
        following = pages[start : stop + 1]
        assert stop == len(pages) or len(following) * max(following) > most, "one more row would have fitted"
        start = stop


def step(geometry: KVGeometry, lengths: list[int]) -> AttentionBatch:
    """Decode rows of these lengths, which all read the same pages: of one prefix, which makes them many and long."""
    width = -(-max(lengths) // geometry.page_size)
    return AttentionBatch(
        num_decode=len(lengths),
        query_lens=[1] * len(lengths),
        kv_lens=lengths,
        slot_mapping=torch.arange(len(lengths)) + width * geometry.page_size,
        page_table=torch.arange(width).repeat(len(lengths), 1),
    )


LENGTHS = [3] + [200] * 20


def test_a_short_row_in_front_makes_no_larger_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = KVGeometry(80, 4, 2, 1, 8, torch.float32)
    batch = step(geometry, LENGTHS)
    run_bytes = geometry.page_bytes // geometry.num_layers
    for module in (paged_decode, latent_plan):
        monkeypatch.setattr(module, "TILE_BYTES", 120 * run_bytes)
    table, lengths = batch.page_table.numpy(), np.array(LENGTHS)
    tiles = paged_decode.plan_paged_decode(PoolReader(geometry), table, lengths)._tiles
    assert max(tile.lengths.shape[0] for tile in tiles) == 2

    latent = KVGeometry(80, 4, 2, 1, 16, torch.float32, num_tensors=1, latent_width=12)
    assert latent.page_bytes // latent.num_layers == run_bytes
    plan = latent_plan.plan_latent(latent_plan.LatentPool(latent), step(latent, LENGTHS))
    assert max(tile.lengths.shape[0] for tile in plan.tiles) == 2


def test_nor_where_layers_have_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = KVGeometry(80, 4, 1, 1, 8, torch.float32)
    monkeypatch.setattr(general_attention, "_TILE_BYTES", 120 * geometry.page_bytes)
    read: list[int] = []
    gather = PoolReader.gather

    def noting(self: PoolReader, pool: torch.Tensor, runs: torch.Tensor, count: int, *rest: torch.Tensor) -> object:
        read.append(count)
        return gather(self, pool, runs, count, *rest)

    monkeypatch.setattr(PoolReader, "gather", noting)
    ops = CpuOperations(measure=False)
    query = torch.randn(len(LENGTHS), 2, 8)
    key = torch.randn(len(LENGTHS), 1, 8)
    plan = ops.plan_attention(step(geometry, LENGTHS), geometry)
    pool = torch.zeros(geometry.pool_shape)
    ops.attention(query, key, key, pool, 0, plan, scale=1.0, sliding_window=None, sinks=torch.zeros(2))
    assert sum(read) == len(LENGTHS) and max(read) == 2
