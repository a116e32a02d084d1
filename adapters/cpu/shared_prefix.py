"""Prefixes that several running sequences share: kept once, attended to once for all of their queries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.adapters.cpu.decode_slab import copy_pages_out

MIN_SHARED_TOKENS = 128
"""Shorter prefixes are not worth the extra operations of a second attention."""

MIN_SAVED_TOKENS = 512
"""Tokens that a step must read less (prefix length times rows beyond the first) for a prefix to be kept apart."""


@dataclass(slots=True)
class SharedPrefix:
    """Pages that are the start of several sequences.

    Attributes:
        pages: int64[P].
        num_tokens: P times the page size.
        store: [2, layers, num_tokens, G, D], filled by ``load``.
    """

    pages: npt.NDArray[np.int64]
    num_tokens: int
    store: Tensor
    is_loaded: bool = False

    @classmethod
    def allocate(cls, pages: npt.NDArray[np.int64], geometry: KVGeometry) -> SharedPrefix:
        """A prefix whose keys and values are still to be read."""
        num_tokens = len(pages) * geometry.page_size
        shape = (2, geometry.num_layers, num_tokens, geometry.num_kv_heads, geometry.head_dim)
        with torch.inference_mode(False):
            return cls(pages.copy(), num_tokens, torch.empty(shape, dtype=geometry.dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy."""
        return self.store.numel() * self.store.element_size()

    def load(self, pool: Tensor) -> None:
        """Read the pages."""
        for side in (0, 1):
            copy_pages_out(pool, side, torch.from_numpy(self.pages), self.store[side], self.num_tokens)
        self.is_loaded = True

    def starts(self, table_row: npt.NDArray[np.int64], num_pages: int) -> bool:
        """Whether a sequence of ``num_pages`` whole pages starts with these pages."""
        return len(self.pages) <= num_pages and bool(np.array_equal(table_row[: len(self.pages)], self.pages))


def find_shared(
    page_table: npt.NDArray[np.int64], whole_pages: npt.NDArray[np.int64], place: int, page_size: int
) -> tuple[int, npt.NDArray[np.int64]] | None:
    """The prefix that one sequence shares with others, if it is worth keeping apart.

    Args:
        page_table: int64[n, W].
        whole_pages: int64[n], pages of each sequence that are complete.
        place: the sequence in question.

    Returns:
        Number of pages, and the places of all sequences that start with them (``place`` included), or None.
    """
    same_start = np.flatnonzero(page_table[:, 0] == page_table[place, 0])
    if len(same_start) < 2:
        return None
    equal = page_table[same_start] == page_table[place]
    common = np.where(equal.all(axis=1), equal.shape[1], equal.argmin(axis=1))
    common = np.minimum(common, np.minimum(whole_pages[same_start], whole_pages[place]))
    # With the sequences that share most first, the k-th may join for the price of shortening the prefix to its own.
    falling = np.sort(common)[::-1]
    saved_pages = falling * np.arange(len(falling))
    num_pages = int(falling[saved_pages.argmax()])
    if num_pages * page_size < MIN_SHARED_TOKENS or saved_pages.max() * page_size < MIN_SAVED_TOKENS:
        return None
    return num_pages, same_start[common >= num_pages]
