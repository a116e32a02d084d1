"""Drafts from a request's own tokens: what followed the last time its newest tokens appeared (n-gram speculation).

Prompt lookup needs no draft model: code, quotations and structured text repeat themselves. Every n-gram of a row is
hashed into a small table of that row; a look-up compares the tokens themselves, so a collision or an entry of the
row's last owner costs a draft and nothing else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_lite.scheduler.table import RequestTable
from sglang_lite.types import Int32Array, Int64Array

SIZES = (5, 3, 2)
"""Lengths of the n-grams that are looked up, the longest first: a longer match is the better prophet."""

_MOST_SLOTS = 1 << 14
_MULTIPLIER = 0x2545F4914F6CDD1D


class NgramIndex:
    """Where each row's n-grams last ended.

    Args:
        table: whose tokens are indexed.
    """

    def __init__(self, table: RequestTable) -> None:
        self._tokens = table.flat_token_ids
        self._width = table.context_length
        slots = 16
        while slots < min(2 * table.context_length, _MOST_SLOTS):
            slots *= 2
        self._mask = slots - 1
        # [size, row * slots]: position behind the n-gram, 0 for none. Memory is touched where something is stored.
        self._ends: Int32Array = np.zeros((len(SIZES), table.capacity * slots), dtype=np.int32)
        self._indexed: Int32Array = np.zeros(table.capacity, dtype=np.int32)

    def restart(self, rows: Int32Array) -> None:
        """Other requests have these rows now: nothing of them is indexed."""
        self._indexed[rows] = 0

    def extend(self, rows: Int32Array, lengths: Int32Array) -> None:
        """Index every n-gram that ends before the newest token.

        Args:
            rows: int32[n]; lengths: int32[n], known tokens of each.
        """
        counts = np.maximum(lengths - 1 - self._indexed[rows], 0).astype(np.int64)
        if not counts.any():
            return
        owners = np.repeat(rows.astype(np.int64), counts)
        ends = np.repeat(self._indexed[rows].astype(np.int64) + 1, counts) + _offsets(counts)
        self._indexed[rows] = np.maximum(lengths - 1, self._indexed[rows])
        for index, size in enumerate(SIZES):
            whole = ends >= size
            slots = self._slots(owners[whole], ends[whole], size)
            # Of n-grams in one slot the last one is kept: numpy assigns in order, and ends rise.
            self._ends[index, slots] = ends[whole]

    def find(self, rows: Int32Array, lengths: Int32Array) -> Int64Array:
        """int64[n]: position behind the last earlier occurrence of each row's newest tokens, 0 where there is none."""
        owners, stops = rows.astype(np.int64), lengths.astype(np.int64)
        found: Int64Array = np.zeros(len(rows), dtype=np.int64)
        for index, size in enumerate(SIZES):
            open_rows = np.flatnonzero((found == 0) & (stops > size))
            if not len(open_rows):
                continue
            row, stop = owners[open_rows], stops[open_rows]
            ends = self._ends[index, self._slots(row, stop, size)].astype(np.int64)
            equal = (ends >= size) & (ends < stop)
            base = row * self._width
            for back in range(1, size + 1):
                equal &= self._tokens[base + np.maximum(ends - back, 0)] == self._tokens[base + stop - back]
            found[open_rows[equal]] = ends[equal]
        return found

    def draft(self, rows: Int32Array, lengths: Int32Array, count: int) -> tuple[npt.NDArray[np.bool_], Int32Array]:
        """Whether each row has a draft (bool[n]), and ``count`` tokens for each (int32[n, count]).

        A draft that reaches the newest token goes on with itself: what repeats with a period goes on repeating.
        """
        starts = self.find(rows, lengths)
        has_draft = starts > 0
        periods = np.maximum(lengths - starts, 1)[:, None]
        places = starts[:, None] + np.arange(count) % periods
        return has_draft, self._tokens[rows.astype(np.int64)[:, None] * self._width + places]

    def _slots(self, rows: Int64Array, ends: Int64Array, size: int) -> Int64Array:
        base = rows * self._width + ends
        code = np.zeros(len(rows), dtype=np.uint64)
        for back in range(size, 0, -1):
            code = (code + self._tokens[base - back].astype(np.uint64) + np.uint64(1)) * np.uint64(_MULTIPLIER)
        return rows * (self._mask + 1) + ((code >> np.uint64(40)) & np.uint64(self._mask)).astype(np.int64)


def _offsets(counts: Int64Array) -> Int64Array:
    """0, 1, .., counts[0] - 1, 0, 1, .., counts[1] - 1, ..."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
