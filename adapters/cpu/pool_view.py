"""Index arithmetic over the page-major pool, and reads of whole pages into reused scratch memory."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_lite.adapters.base import KVGeometry


class PoolReader:
    """Views of a pool [pages, layers, 2, page_size, G, D].

    Two flat views serve every access: *vectors*, one token's key or value of one layer ([G * D]), and *runs*, one
    page's keys or values of one layer ([page_size * G * D], contiguous). A gather of runs moves kilobytes at a time.

    Args:
        geometry: the pool's extents.
    """

    def __init__(self, geometry: KVGeometry) -> None:
        self.geometry = geometry
        layers, page_size = geometry.num_layers, geometry.page_size
        self.vector_width = geometry.num_kv_heads * geometry.head_dim
        self._layer_vectors = (torch.arange(layers) * 2 * page_size).view(layers, 1, 1)
        self._layer_vectors = self._layer_vectors + torch.tensor([0, page_size]).view(1, 2, 1)
        self._layer_runs = (torch.arange(layers) * 2).view(layers, 1, 1) + torch.tensor([0, 1]).view(1, 2, 1)
        with torch.inference_mode(False):  # written in both modes
            self._scratch = torch.empty(0, dtype=geometry.dtype)

    def vectors(self, pool: Tensor) -> Tensor:
        """[pages * layers * 2 * page_size, G * D]."""
        return pool.view(-1, self.vector_width)

    def slot_rows(self, slots: Tensor) -> Tensor:
        """int64[T] slots -> int64[layers, 2, T] rows of ``vectors``: keys and values of each layer."""
        page_size = self.geometry.page_size
        pages = torch.div(slots, page_size, rounding_mode="floor")
        stride = self.geometry.num_layers * 2 * page_size
        return self._layer_vectors + (pages * (stride - page_size) + slots)

    def page_runs(self, pages: Tensor) -> Tensor:
        """int64[N] pages -> int64[layers, 2 * N] runs: keys of all pages, then values."""
        runs = self._layer_runs + pages * (self.geometry.num_layers * 2)
        return runs.view(self.geometry.num_layers, -1)

    def gather(self, pool: Tensor, runs: Tensor, num_rows: int, tails: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Read the runs of ``num_rows`` equally long rows: keys and values [num_rows, tokens, G, D].

        The result lies in scratch memory and holds until the next call.

        Args:
            tails: int64[], vectors of the result to clear: slots behind the end of a sequence hold anything, and
                what is not a number would survive a mask.
        """
        geometry = self.geometry
        run_width = geometry.page_size * self.vector_width
        needed = runs.numel() * run_width
        if self._scratch.numel() < needed:
            with torch.inference_mode(False):
                self._scratch = torch.empty(needed, dtype=geometry.dtype)
        scratch = self._scratch[:needed].view(-1, run_width)
        torch.index_select(pool.view(-1, run_width), 0, runs, out=scratch)
        if tails is not None:
            scratch.view(-1, self.vector_width).index_fill_(0, tails, 0.0)
        both = scratch.view(2, num_rows, -1, geometry.num_kv_heads, geometry.head_dim)
        return both[0], both[1]
