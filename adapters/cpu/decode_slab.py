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

    Float32 keys are stored with the tokens innermost: the product of a few queries with all keys then runs over
    consecutive memory, measured a quarter faster than any arrangement with the head size innermost.

    Attributes:
        capacity: tokens of a slot.
        keys, values: [layers, slots, capacity, G, D], views of whatever arrangement the memory has.
        rows: int32[slots], row of the request table in each slot, or ``FREE``.
    """

    __slots__ = ("_geometry", "capacity", "keys", "rows", "values")

    def __init__(self, geometry: KVGeometry, capacity: int) -> None:
        self._geometry = geometry
        self.capacity = capacity
        self.rows = np.empty(0, dtype=np.int32)
        self.keys, self.values = self._allocate(0)

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
        keys, values = self._allocate(held + num_slots)
        keys[:, :held].copy_(self.keys)
        values[:, :held].copy_(self.values)
        self.keys, self.values = keys, values
        self.rows = np.concatenate([self.rows, np.full(num_slots, FREE, dtype=np.int32)])

    def load(self, slot: int, pool: Tensor, pages: Tensor, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` tokens of ``pages`` (int64[P]) into a slot and clear what is behind them."""
        for side, store in enumerate((self.keys, self.values)):
            copy_pages_out(pool, side, pages, store[:, slot], num_tokens)
            # What an earlier sequence left would pass a mask if it is not a number.
            store[:, slot, num_tokens:].zero_()

    def _allocate(self, num_slots: int) -> tuple[Tensor, Tensor]:
        geometry = self._geometry
        layers, groups, head_dim = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
        with torch.inference_mode(False):  # written in both modes
            values = torch.empty(layers, num_slots, groups, self.capacity, head_dim, dtype=geometry.dtype)
            if geometry.dtype != torch.float32:
                return torch.empty_like(values).transpose(2, 3), values.transpose(2, 3)
            keys = torch.empty(layers, num_slots, groups, head_dim, self.capacity)
            return keys.permute(0, 1, 4, 2, 3), values.transpose(2, 3)


def copy_pages_out(pool: Tensor, side: int, pages: Tensor, target: Tensor, num_tokens: int) -> None:
    """Copy the keys (side 0) or values (side 1) of whole pages into one sequence's memory.

    Args:
        pool: [pages, layers, 2, page_size, G, D].
        pages: int64[P], in order; they hold at least ``num_tokens`` tokens.
        target: [layers, N, G, D] with N >= ``num_tokens``.
    """
    page_size = pool.shape[3]
    pool = pool[:, :, side]
    chunk = max(1, _COPY_BYTES // (pool[0].numel() * pool.element_size()))
    for first in range(0, -(-num_tokens // page_size), chunk):
        block = pool.index_select(0, pages[first : first + chunk]).transpose(0, 1).flatten(1, 2)
        start = first * page_size
        stop = min(num_tokens, start + block.shape[1])
        target[:, start:stop].copy_(block[:, : stop - start])
