"""Attention with sinks or capped scores: every kind of row reads the pool, with an explicit mask.

Few layers of few models need it, so it has one path for decode rows and one for chunks, none of the copies that make
plain decode fast. A layer with a window reads only the pages that its window reaches.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch
from sglang_lite.adapters.cpu.pool_view import PoolReader
from sglang_lite.adapters.cpu.softmax_attention import attend, chunk_mask, join, length_mask
from sglang_lite.adapters.cpu.tiles import tile_stop

_TILE_BYTES = 4 << 20
"""Keys and values of decode rows gathered at a time."""

_CAPPED_QUERIES = 256
"""Queries of a chunk whose capped scores exist at a time: without a fused kernel they are all in memory."""


class GeneralAttention:
    """The rows of one step.

    Args:
        batch: of the step.
        reader: of the pool.
    """

    def __init__(self, batch: AttentionBatch, reader: PoolReader) -> None:
        self._reader = reader
        self._num_decode = batch.num_decode
        self._table = batch.page_table.numpy()
        self._kv_lens = np.asarray(batch.kv_lens, dtype=np.int64)
        self._query_lens = batch.query_lens
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def run(
        self,
        query: Tensor,
        pool: Tensor,
        layer: int,
        *,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
        logit_cap: float | None,
    ) -> Tensor:
        """[T, H, D] -> [T, H, D]. The pool holds the step's keys and values already."""
        groups = self._reader.geometry.num_kv_heads
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        log_sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        if self._num_decode:
            self._decode(query, pool, layer, scale, window, logit_cap, output, log_sums)
        start = self._num_decode
        for row in range(self._num_decode, len(self._query_lens)):
            stop = start + self._query_lens[row]
            grouped = query[start:stop].view(stop - start, groups, -1, query.shape[2]).permute(1, 2, 0, 3)
            if window is None and logit_cap is None:
                mixed, log_sum = self._whole_chunk(row, pool, layer, grouped, scale)
            else:
                keys, values, mask = self._chunk(row, pool, layer, window, grouped)
                mixed, log_sum = attend_capped(grouped, keys, values, scale, mask, logit_cap)
            output[start:stop] = mixed.permute(2, 0, 1, 3).flatten(1, 2)
            log_sums[start:stop] = log_sum.permute(2, 0, 1).flatten(1)
            start = stop
        if sinks is not None:
            # exp(log sum) / (exp(log sum) + exp(sink)): what is left of the weights beside the sink.
            output *= torch.sigmoid(log_sums - sinks.float()).unsqueeze(-1).to(output.dtype)
        return output

    def _decode(
        self,
        query: Tensor,
        pool: Tensor,
        layer: int,
        scale: float,
        window: int | None,
        logit_cap: float | None,
        output: Tensor,
        log_sums: Tensor,
    ) -> None:
        """The rows with one query each, a few at a time, padded to the longest of them."""
        geometry = self._reader.geometry
        page_size, n = geometry.page_size, self._num_decode
        lengths, table = self._kv_lens[:n], self._table[:n]
        first_page = np.maximum(0, lengths - window) // page_size if window is not None else np.zeros_like(lengths)
        reached = lengths - first_page * page_size  # tokens from the first page that is read
        num_pages = -(-reached // page_size)
        grouped = query[:n].view(n, geometry.num_kv_heads, -1, query.shape[2])
        start = 0
        while start < n:
            tile = slice(start, tile_stop(num_pages, start, _TILE_BYTES * geometry.num_layers // geometry.page_bytes))
            width = int(num_pages[tile].max())
            places = np.minimum(first_page[tile, None] + np.arange(width), table.shape[1] - 1)
            pages = torch.from_numpy(np.take_along_axis(table[tile], places, axis=1).reshape(-1))
            held = torch.from_numpy(reached[tile])
            empty = (torch.arange(width * page_size) >= held.unsqueeze(1)).view(-1).nonzero().squeeze(1)
            tails = torch.cat([empty, empty + len(held) * width * page_size])
            keys, values = self._reader.gather(pool, self._reader.page_runs(pages)[layer], len(held), tails)
            mask = length_mask(held, width * page_size, window, query.dtype)
            mixed, log_sum = attend_capped(
                grouped[tile], keys.transpose(1, 2), values.transpose(1, 2), scale, mask, logit_cap
            )
            output[tile] = mixed.flatten(1, 2)
            log_sums[tile] = log_sum.flatten(1)
            start = tile.stop

    def _whole_chunk(self, row: int, pool: Tensor, layer: int, grouped: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """A chunk that sees the whole sequence: its prefix and itself apart.

        A mask over both together would have the size of their product, at long contexts more than the pool.
        """
        kv_len, num_queries = int(self._kv_lens[row]), self._query_lens[row]
        prefix = kv_len - num_queries
        keys, values = self._gather(row, pool, layer, 0, grouped.shape[1])
        mixed, log_sum = attend(grouped, keys[:, :, prefix:], values[:, :, prefix:], scale=scale, causal=True)
        if not prefix:
            return mixed, log_sum
        before, before_log_sum = attend(grouped, keys[:, :, :prefix], values[:, :, :prefix], scale=scale)
        return join(mixed, log_sum, before, before_log_sum), torch.logaddexp(log_sum, before_log_sum)

    def _chunk(
        self, row: int, pool: Tensor, layer: int, window: int | None, grouped: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [G, H / G, K, D] that a chunk's queries reach, and the mask [1, 1, Q, K]."""
        page_size = self._reader.geometry.page_size
        kv_len, num_queries = int(self._kv_lens[row]), self._query_lens[row]
        prefix = kv_len - num_queries
        first_key = 0 if window is None else max(0, prefix - window + 1) // page_size * page_size
        keys, values = self._gather(row, pool, layer, first_key, grouped.shape[1])
        if (row, window) not in self._masks:
            mask = chunk_mask(prefix, num_queries, first_key, kv_len - first_key, window)
            self._masks[row, window] = mask.to(grouped.dtype).view(1, 1, *mask.shape)
        return keys, values, self._masks[row, window]

    def _gather(self, row: int, pool: Tensor, layer: int, first_key: int, repeat: int) -> tuple[Tensor, Tensor]:
        """Keys and values [G, repeat, K, D] of a row from ``first_key``, the first of a page, on.

        Every query head of a group reads the same memory, which holds until the next call.
        """
        page_size, kv_len = self._reader.geometry.page_size, int(self._kv_lens[row])
        pages = torch.from_numpy(self._table[row, first_key // page_size : -(-kv_len // page_size)].copy())
        keys, values = self._reader.gather(pool, self._reader.page_runs(pages)[layer], 1)
        spread = [x[0, : kv_len - first_key].transpose(0, 1).unsqueeze(1) for x in (keys, values)]
        return spread[0].expand(-1, repeat, -1, -1), spread[1].expand(-1, repeat, -1, -1)


def attend_capped(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor, logit_cap: float | None
) -> tuple[Tensor, Tensor]:
    """``softmax_attention.attend`` with scores capped before the mask.

    Args:
        query: [N, H, Q, D]. key, value: [N, H, K, D]. mask: broadcastable to [N, H, Q, K].
        logit_cap: c of c * tanh(s / c), None leaves the scores as they are.

    Returns:
        [N, H, Q, D] and float32[N, H, Q], the natural log of the sum of exponentiated scores.
    """
    if logit_cap is None:
        return attend(query, key, value, scale=scale, mask=mask)
    outputs, log_sums = [], []
    for start in range(0, query.shape[2], _CAPPED_QUERIES):
        part = slice(start, start + _CAPPED_QUERIES)
        scores = torch.matmul(query[:, :, part], key.transpose(-1, -2)).float()
        scores = torch.tanh(scores * (scale / logit_cap)) * logit_cap + mask[:, :, part].float()
        log_sum = scores.logsumexp(-1, keepdim=True)
        outputs.append(torch.matmul((scores - log_sum).exp().to(value.dtype), value))
        log_sums.append(log_sum.squeeze(-1))
    return torch.cat(outputs, dim=2), torch.cat(log_sums, dim=2)
