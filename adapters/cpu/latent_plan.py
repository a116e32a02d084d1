"""Where the rows of a step lie in a pool of latent rows: writes, decode tiles, prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch, KVGeometry
from sglang_lite.adapters.cpu.paged_decode import TILE_BYTES
from sglang_lite.adapters.cpu.softmax_attention import length_mask
from sglang_lite.adapters.cpu.tiles import tile_stop

_SORTED_SAVING = 0.85
"""Rows are handled in order of length when that reads at most this share of what plan order would."""


@dataclass(slots=True)
class DecodeTile:
    """Decode rows that are read together, padded to the longest.

    Attributes:
        places: slice of the (possibly sorted) decode rows.
        pages: int64[n * pages per row].
        lengths: int64[n], tokens of each sequence.
        width: tokens read for each row.
        tails: int64[], tokens of the result that lie behind the end of their sequence; None without any.
    """

    places: slice
    pages: Tensor
    lengths: Tensor
    width: int
    tails: Tensor | None
    masks: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Mask [n, 1, 1, width] shared by the layers, or None when nothing is hidden."""
        if self.tails is None:
            return None
        if dtype not in self.masks:
            self.masks[dtype] = length_mask(self.lengths, self.width, None, dtype)
        return self.masks[dtype]


@dataclass(frozen=True, slots=True)
class LatentChunk:
    """One prefill chunk.

    Attributes:
        start, stop: its tokens in the step.
        kv_len: length of the sequence with the chunk.
        pages: int64[ceil(kv_len / page_size)].
    """

    start: int
    stop: int
    kv_len: int
    pages: Tensor

    @property
    def prefix_len(self) -> int:
        """Tokens of the sequence before this chunk."""
        return self.kv_len - (self.stop - self.start)

    @property
    def tokens(self) -> slice:
        """The chunk's tokens in the step."""
        return slice(self.start, self.stop)

    def pieces(self, most_queries: int) -> list[LatentChunk]:
        """The chunk cut after every ``most_queries`` tokens; each piece has those before it as its prefix."""
        ends = [*range(self.start + most_queries, self.stop, most_queries), self.stop]
        starts = [self.start, *ends[:-1]]
        return [
            LatentChunk(start, end, self.kv_len - (self.stop - end), self.pages)
            for start, end in zip(starts, ends, strict=True)
        ]


class LatentPool:
    """Index arithmetic over a pool [pages, layers, 1, page_size, 1, D] and reads into reused scratch memory."""

    def __init__(self, geometry: KVGeometry) -> None:
        self.geometry = geometry
        with torch.inference_mode(False):  # written in both modes
            self._scratch = torch.empty(0, dtype=geometry.dtype)

    def vectors(self, pool: Tensor) -> Tensor:
        """[pages * layers * page_size, D]: one token's row of one layer."""
        return pool.view(-1, self.geometry.head_dim)

    def slot_rows(self, slots: Tensor) -> tuple[Tensor, ...]:
        """int64[T] slots -> for each layer int64[T], rows of ``vectors``."""
        layers, page_size = self.geometry.num_layers, self.geometry.page_size
        pages = torch.div(slots, page_size, rounding_mode="floor")
        first = slots + pages * (page_size * (layers - 1))
        return (torch.arange(layers).unsqueeze(1) * page_size + first).unbind(0)

    def read_tile(self, pool: Tensor, tile: DecodeTile, layer: int) -> Tensor:
        """[n, width, D] in scratch memory that holds until the next read; what lies behind a sequence is zero."""
        rows = self._read(pool, tile.pages, layer)
        if tile.tails is not None:
            rows.index_fill_(0, tile.tails, 0.0)  # what is not a number would survive a mask
        return rows.view(-1, tile.width, self.geometry.head_dim)

    def read_chunk(self, pool: Tensor, chunk: LatentChunk, layer: int) -> Tensor:
        """[kv_len, D] in scratch memory that holds until the next read."""
        return self._read(pool, chunk.pages, layer)[: chunk.kv_len]

    def _read(self, pool: Tensor, pages: Tensor, layer: int) -> Tensor:
        geometry = self.geometry
        run_width = geometry.page_size * geometry.head_dim
        needed = pages.numel() * run_width
        if self._scratch.numel() < needed:
            with torch.inference_mode(False):
                self._scratch = torch.empty(needed, dtype=geometry.dtype)
        scratch = self._scratch[:needed]
        runs = pages * geometry.num_layers + layer
        torch.index_select(pool.view(-1, run_width), 0, runs, out=scratch.view(-1, run_width))
        return scratch.view(-1, geometry.head_dim)


@dataclass(slots=True)
class CpuLatentPlan:
    """Indices of one step.

    Attributes:
        pool: how the pool that the step was planned for is read.
        write_rows: for each layer int64[T], vectors of the pool that receive the tokens' rows.
        num_decode: decode rows.
        order: int64[num_decode], the decode row handled at each place, or None for plan order.
        tiles: they cover all places.
        chunks: the prefill chunks.
    """

    pool: LatentPool
    write_rows: tuple[Tensor, ...]
    num_decode: int
    order: Tensor | None
    tiles: list[DecodeTile]
    chunks: list[LatentChunk]


def plan_latent(pool: LatentPool, batch: AttentionBatch) -> CpuLatentPlan:
    """Work common to the layers of one step."""
    table = batch.page_table.numpy()
    num_decode = batch.num_decode
    order: Tensor | None = None
    tiles: list[DecodeTile] = []
    if num_decode:
        lengths = np.asarray(batch.kv_lens[:num_decode], dtype=np.int64)
        order, tiles = _plan_decode(pool.geometry, table[:num_decode], lengths)
    chunks = []
    start = num_decode
    for index in range(num_decode, len(batch.query_lens)):
        kv_len, stop = batch.kv_lens[index], start + batch.query_lens[index]
        pages = torch.from_numpy(table[index, : -(-kv_len // pool.geometry.page_size)])
        chunks.append(LatentChunk(start, stop, kv_len, pages))
        start = stop
    return CpuLatentPlan(pool, pool.slot_rows(batch.slot_mapping), num_decode, order, tiles, chunks)


def _plan_decode(
    geometry: KVGeometry, table: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[Tensor | None, list[DecodeTile]]:
    """Cut the rows into tiles of about ``TILE_BYTES``, by falling length where that saves reading."""
    page_size = geometry.page_size
    page_bytes = page_size * geometry.head_dim * geometry.dtype.itemsize
    num_pages = -(-lengths // page_size)
    order = None
    if num_pages.sum() < _SORTED_SAVING * num_pages.max() * len(num_pages):
        order = np.argsort(-num_pages, kind="stable")
        table, lengths, num_pages = table[order], lengths[order], num_pages[order]
    tiles = []
    start = 0
    while start < len(lengths):
        stop = tile_stop(num_pages, start, TILE_BYTES // page_bytes)
        pages = int(num_pages[start:stop].max())
        tile_pages = torch.from_numpy(np.ascontiguousarray(table[start:stop, :pages]).reshape(-1))
        tile_lengths = torch.from_numpy(lengths[start:stop])
        width = pages * page_size
        empty = (torch.arange(width) >= tile_lengths.unsqueeze(1)).view(-1).nonzero().squeeze(1)
        tails = empty if len(empty) else None
        tiles.append(DecodeTile(slice(start, stop), tile_pages, tile_lengths, width, tails))
        start = stop
    return None if order is None else torch.from_numpy(order), tiles
