"""Prefill attention: each chunk attends to its prefix in the pool and, causally, to itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch
from sglang_lite.adapters.cpu.pool_view import PoolReader
from sglang_lite.adapters.cpu.softmax_attention import attend, chunk_mask, join


@dataclass(slots=True)
class PrefillRow:
    """One chunk.

    Attributes:
        start, stop: its tokens in the step.
        kv_len: length of the sequence with the chunk.
        pages: int64[ceil(kv_len / page_size)].
        runs: (first page, end page) -> int64[layers, 2 * n], made at first use; layers share them.
        masks: window -> mask [1, 1, queries, keys], made at first use.
    """

    start: int
    stop: int
    kv_len: int
    pages: Tensor
    runs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    masks: dict[int, Tensor] = field(default_factory=dict)

    @property
    def prefix_len(self) -> int:
        """Tokens of the sequence before this chunk."""
        return self.kv_len - (self.stop - self.start)

    def gather(self, reader: PoolReader, pool: Tensor, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the positions [first, end), ``first`` at the start of a page: [end - first, G, D]."""
        page_size = reader.geometry.page_size
        span = (first // page_size, -(-end // page_size))
        if span not in self.runs:
            self.runs[span] = reader.page_runs(self.pages[span[0] : span[1]])
        keys, values = reader.gather(pool, self.runs[span][layer], 1)
        return keys[0, : end - first], values[0, : end - first]


PrefillGroup = list[PrefillRow]
"""Chunks behind the same prefix: the same pages and length, or no prefix at all."""


def plan_prefill(reader: PoolReader, batch: AttentionBatch, page_table: npt.NDArray[np.int64]) -> list[PrefillGroup]:
    """The chunks of a step: rows behind those that decode or verify."""
    groups: dict[tuple[int, bytes], PrefillGroup] = {}
    page_size = reader.geometry.page_size
    first = batch.num_decode + batch.num_verify
    start = sum(batch.query_lens[:first])
    for index in range(first, len(batch.query_lens)):
        kv_len = batch.kv_lens[index]
        stop = start + batch.query_lens[index]
        row = PrefillRow(start, stop, kv_len, torch.from_numpy(page_table[index, : -(-kv_len // page_size)]))
        prefix_pages = page_table[index, : -(-row.prefix_len // page_size)]
        groups.setdefault((row.prefix_len, prefix_pages.tobytes()), []).append(row)
        start = stop
    return list(groups.values())


def prefill_attention(
    group: PrefillGroup,
    reader: PoolReader,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    layer: int,
    scale: float,
    window: int | None,
    output: Tensor,
) -> None:
    """Attention of the chunks of a group, into their rows of ``output`` [T, H, D]. The pool holds them already."""
    groups = reader.geometry.num_kv_heads
    plain: list[tuple[PrefillRow, Tensor, Tensor]] = []
    for row in group:
        span = _span(row)
        grouped = split_heads(query[span], groups)
        if window is not None and row.kv_len > window:
            split_heads(output[span], groups).copy_(_windowed(row, reader, grouped, pool, layer, scale, window))
            continue
        repeat = grouped.shape[1]
        keys, values = share_heads(key[span], repeat), share_heads(value[span], repeat)
        plain.append((row, *attend(grouped, keys, values, scale=scale, causal=True)))
    if not plain or not plain[0][0].prefix_len:
        for row, mixed, _ in plain:
            split_heads(output[_span(row)], groups).copy_(mixed)
        return
    before, before_log_sum = _attend_prefix([row for row, *_ in plain], reader, query, pool, layer, scale)
    place = 0
    for row, mixed, log_sum in plain:
        part = slice(place, place + row.stop - row.start)
        joined = join(mixed, log_sum, before[:, :, part], before_log_sum[:, :, part])
        split_heads(output[_span(row)], groups).copy_(joined)
        place = part.stop


def _attend_prefix(
    rows: PrefillGroup, reader: PoolReader, query: Tensor, pool: Tensor, layer: int, scale: float
) -> tuple[Tensor, Tensor]:
    """All queries of the rows (N of them, one after another) on their common prefix: [G, H / G, N, D] and log sums.

    The heads of a group and the rows are merged into one long list of queries: large products run nearer to the
    processor's peak, and the prefix is gathered once.
    """
    queries = torch.cat([query[_span(row)] for row in rows]) if len(rows) > 1 else query[_span(rows[0])]
    grouped = split_heads(queries, reader.geometry.num_kv_heads)
    keys, values = rows[0].gather(reader, pool, layer, 0, rows[0].prefix_len)
    merged = grouped.flatten(1, 2).unsqueeze(0)
    before, log_sum = attend(
        merged, keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0), scale=scale
    )
    return before.view(grouped.shape), log_sum.view(grouped.shape[:3])


def _span(row: PrefillRow) -> slice:
    return slice(row.start, row.stop)


def _windowed(
    row: PrefillRow, reader: PoolReader, grouped: Tensor, pool: Tensor, layer: int, scale: float, window: int
) -> Tensor:
    """A chunk some of whose queries do not see the start of the sequence: everything from the pool, masked."""
    page_size = reader.geometry.page_size
    first_key = max(0, row.prefix_len - window + 1) // page_size * page_size
    if window not in row.masks:
        mask = chunk_mask(row.prefix_len, row.stop - row.start, first_key, row.kv_len - first_key, window)
        row.masks[window] = mask.to(grouped.dtype).view(1, 1, *mask.shape)
    keys, values = row.gather(reader, pool, layer, first_key, row.kv_len)
    repeat = grouped.shape[1]
    mixed, _ = attend(
        grouped, share_heads(keys, repeat), share_heads(values, repeat), scale=scale, mask=row.masks[window]
    )
    return mixed


def split_heads(x: Tensor, groups: int) -> Tensor:
    """[n, H, D] -> view [G, H / G, n, D]."""
    return x.view(x.shape[0], groups, -1, x.shape[2]).permute(1, 2, 0, 3)


def share_heads(x: Tensor, repeat: int) -> Tensor:
    """[n, G, D] keys or values -> view [G, repeat, n, D]: every query head of a group reads the same memory."""
    return x.transpose(0, 1).unsqueeze(1).expand(-1, repeat, -1, -1)
