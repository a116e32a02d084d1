"""How many decode rows are read together, padded to the longest of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def tile_stop(num_pages: npt.NDArray[np.int64], start: int, most_pages: int) -> int:
    """The row behind a tile that begins at ``start``: as many rows as take ``most_pages`` pages with padding, or one.

    Every row counts as the longest of the tile, which need not be the first: rows that happen to follow a short one
    may be as long as the pool.

    Args:
        num_pages: int64[n], pages of each row, each >= 1.
    """
    first = num_pages[start : start + max(1, most_pages // int(num_pages[start]))]
    taken = np.maximum.accumulate(first) * np.arange(1, len(first) + 1)
    return start + max(1, int(np.searchsorted(taken, most_pages, side="right")))
