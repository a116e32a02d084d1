"""Decode attention that reads the pool: pages are gathered tile by tile, one query per row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_lite.adapters.cpu.pool_view import PoolReader
from sglang_lite.adapters.cpu.softmax_attention import attend, length_mask
from sglang_lite.adapters.cpu.tiles import tile_stop

TILE_BYTES = 4 << 20
"""Keys and values gathered at a time: small enough to be still in the cache when attention reads them."""

_SORTED_SAVING = 0.85
"""Rows are handled in order of length when that reads at most this share of what plan order would."""


@dataclass(slots=True)
class DecodeTile:
    """Rows gathered together, padded to the longest.

    Attributes:
        rows: slice of the (possibly sorted) rows.
        runs: int64[layers, 2 * n * pages], see ``PoolReader.page_runs``.
        lengths: int64[n].
        tails: int64[], see ``PoolReader.gather``; None when every row fills its pages.
        masks: window -> mask, made at first use; layers share them.
    """

    rows: slice
    runs: Tensor
    lengths: Tensor
    width: int
    tails: Tensor | None
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Mask [n, 1, 1, width], or None when nothing is hidden."""
        if window not in self.masks:
            hides = int(self.lengths.min()) < self.width or (window is not None and window < self.width)
            self.masks[window] = length_mask(self.lengths, self.width, window, dtype) if hides else None
        return self.masks[window]


class PagedDecode:
    """The tiles of a step.

    Args:
        order: int64[n], row handled at each place, or None for plan order.
        tiles: they cover all places.
    """

    __slots__ = ("_order", "_tiles")

    def __init__(self, order: Tensor | None, tiles: list[DecodeTile]) -> None:
        self._order = order
        self._tiles = tiles

    def run(
        self,
        reader: PoolReader,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pool: Tensor,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """[n, H, D] queries -> [n, H, D]. The pool holds the step's keys and values already."""
        num_rows, num_heads, head_dim = query.shape
        groups = reader.geometry.num_kv_heads
        if self._order is not None:
            query = query.index_select(0, self._order)
        # The heads of a group are the queries of one attention problem, so that its keys are read once.
        grouped = query.view(num_rows, groups, num_heads // groups, head_dim)
        output = query.new_empty(num_rows, groups, num_heads // groups, head_dim)
        for tile in self._tiles:
            keys, values = reader.gather(pool, tile.runs[layer], tile.lengths.shape[0], tile.tails)
            part, _ = attend(
                grouped[tile.rows],
                keys.transpose(1, 2),
                values.transpose(1, 2),
                scale=scale,
                mask=tile.mask(window, query.dtype),
            )
            output[tile.rows] = part
        output = output.view(num_rows, num_heads, head_dim)
        if self._order is None:
            return output
        return torch.empty_like(output).index_copy_(0, self._order, output)


def plan_paged_decode(
    reader: PoolReader, page_table: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> PagedDecode:
    """Cut the rows into tiles of about ``TILE_BYTES``.

    Args:
        page_table: int64[n, W].
        lengths: int64[n], each >= 1.
    """
    geometry = reader.geometry
    page_run_bytes = geometry.page_bytes // geometry.num_layers
    page_size = geometry.page_size
    num_pages = -(-lengths // page_size)
    order: npt.NDArray[np.int64] | None = None
    if num_pages.sum() < _SORTED_SAVING * num_pages.max() * len(num_pages):
        order = np.argsort(-num_pages, kind="stable")
        page_table, lengths, num_pages = page_table[order], lengths[order], num_pages[order]
    tiles = []
    start = 0
    while start < len(lengths):
        stop = tile_stop(num_pages, start, TILE_BYTES // page_run_bytes)
        pages = int(num_pages[start:stop].max())
        runs = reader.page_runs(torch.from_numpy(page_table[start:stop, :pages].reshape(-1)))
        tiles.append(_make_tile(slice(start, stop), runs, torch.from_numpy(lengths[start:stop]), pages * page_size))
        start = stop
    return PagedDecode(None if order is None else torch.from_numpy(order), tiles)


def _make_tile(rows: slice, runs: Tensor, lengths: Tensor, width: int) -> DecodeTile:
    empty = (torch.arange(width) >= lengths.unsqueeze(1)).view(-1).nonzero().squeeze(1)
    tails = torch.cat([empty, empty + lengths.shape[0] * width]) if len(empty) else None
    return DecodeTile(rows, runs, lengths, width, tails)
