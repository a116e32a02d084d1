"""Memory of the decode workspace: keys and values of running sequences, contiguous per sequence."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.base import KVGeometry

FREE = -1
"""Row of a slot that nobody has."""

_SMALLEST_CAPACITY = 64
_COPY_BYTES = 16 << 20
"""Pages are copied out of the pool at most this much at a time, since the copy passes through a temporary."""


def capacity_for(num_tokens: int) -> int:
    """Tokens of the slots that take a sequence of this length: 64, 96, 128, 192, 256, 384, ...

    Steps of a third to a half keep both the memory behind the end of a sequence and the number of slabs small.
    """
    capacity = _SMALLEST_CAPACITY
    while capacity < num_tokens:
        half = capacity & (capacity - 1) == 0  # a power of two
        capacity = capacity * 3 // 2 if half else capacity * 4 // 3
    return capacity


class Slab:
    """Slots of equal capacity.

    Attributes:
        capacity: tokens of a slot.
        store: [layers, 2, slots, capacity, G, D].
        rows: int32[slots], row of the request table in each slot, or ``FREE``.
    """

    __slots__ = ("_geometry", "capacity", "rows", "store")

    def __init__(self, geometry: KVGeometry, capacity: int) -> None:
        self._geometry = geometry
        self.capacity = capacity
        self.rows = np.empty(0, dtype=np.int32)
        self.store = self._allocate(0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot over all layers."""
        return self._geometry.bytes_per_token * self.capacity

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self.slot_bytes * len(self.rows)

    @property
    def extent(self) -> int:
        """Slots up to the last one in use."""
        used = np.flatnonzero(self.rows != FREE)
        return int(used[-1]) + 1 if len(used) else 0

    def free_slot(self) -> int | None:
        """The first slot that nobody has."""
        free = np.flatnonzero(self.rows == FREE)
        return int(free[0]) if len(free) else None

    def grow(self, num_slots: int) -> None:
        """Add free slots at the end."""
        held = len(self.rows)
        store = self._allocate(held + num_slots)
        store[:, :, :held].copy_(self.store)
        self.store = store
        self.rows = np.concatenate([self.rows, np.full(num_slots, FREE, dtype=np.int32)])

    def load(self, slot: int, pool: Tensor, pages: Tensor, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` tokens of ``pages`` (int64[P]) into a slot and clear what is behind them."""
        copy_pages_out(pool, pages, self.store[:, :, slot], num_tokens)
        # What an earlier sequence left would pass a mask if it is not a number.
        self.store[:, :, slot, num_tokens:].zero_()

    def vectors(self) -> Tensor:
        """Tokens as rows: [layers * 2 * slots * capacity, G * D]."""
        return self.store.view(-1, self._geometry.num_kv_heads * self._geometry.head_dim)

    def write_rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """int64[n] slots and positions in them -> int64[layers, 2, n] rows of ``vectors``."""
        planes = torch.arange(self._geometry.num_layers * 2).view(-1, 2, 1) * (len(self.rows) * self.capacity)
        return planes + (slots * self.capacity + positions)

    def _allocate(self, num_slots: int) -> Tensor:
        geometry = self._geometry
        shape = (geometry.num_layers, 2, num_slots, self.capacity, geometry.num_kv_heads, geometry.head_dim)
        with torch.inference_mode(False):  # written in both modes
            return torch.empty(shape, dtype=geometry.dtype)


def copy_pages_out(pool: Tensor, pages: Tensor, target: Tensor, num_tokens: int) -> None:
    """Copy tokens of whole pages into contiguous memory.

    Args:
        pool: [pages, layers, 2, page_size, G, D].
        pages: int64[P], in order; they hold at least ``num_tokens`` tokens.
        target: [layers, 2, N, G, D] with N >= ``num_tokens``.
    """
    page_size = pool.shape[3]
    chunk = max(1, _COPY_BYTES // (pool[0].numel() * pool.element_size()))
    for first in range(0, -(-num_tokens // page_size), chunk):
        block = pool.index_select(0, pages[first : first + chunk]).permute(1, 2, 0, 3, 4, 5)
        start = first * page_size
        whole = min(block.shape[2], (num_tokens - start) // page_size)
        middle = start + whole * page_size
        full = block[:, :, :whole]
        target[:, :, start:middle].view(full.shape).copy_(full)
        rest = min(num_tokens - middle, page_size) if whole < block.shape[2] else 0
        if rest > 0:
            target[:, :, middle : middle + rest].copy_(block[:, :, whole, :rest])
