"""The decode batch: the rows that draw one token per step, as arrays that only change when the set changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_lite.scheduler.table import RequestTable
from sglang_lite.types import Int32Array, Int64Array

_GROWTH_COLUMNS = 8
"""Page columns gathered ahead, so that sequences can grow for that many pages without another gather."""

_NEVER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Columns of the decode rows of one plan; n rows.

    Attributes:
        rows, positions, kv_lens, generated: int32[n]; slots: int64[n]; page_table: int32[n, W].
    """

    rows: Int32Array
    positions: Int32Array
    kv_lens: Int32Array
    generated: Int32Array
    slots: Int64Array
    page_table: Int32Array


class PlanBuffers:
    """Memory for the page tables of successive plans: three buffers in turn, one more than there can be plans
    uncommitted while a plan is made. Reusing them is several times cheaper than touching fresh memory each step.
    """

    def __init__(self) -> None:
        self._buffers: list[Int32Array] = [np.empty(0, dtype=np.int32) for _ in range(3)]
        self._next = 0

    def take(self, rows: int, width: int) -> Int32Array:
        """int32[rows, width] with arbitrary content, the caller's until the third call after this one."""
        buffer = self._buffers[self._next]
        if len(buffer) < rows * width:
            buffer = np.empty(rows * width * 5 // 4, dtype=np.int32)
            self._buffers[self._next] = buffer
        self._next = (self._next + 1) % len(self._buffers)
        return buffer[: rows * width].reshape(rows, width)


class DecodeBatch:
    """Rows in the order in which they joined.

    ``kv_lens``, ``slots`` and ``generated`` describe the newest plan; each step replaces them by new arrays, so that
    plans in flight keep theirs. The gathered page table is shared by successive plans: a page appended to it lies
    beyond the lengths of the plans before. When rows join or leave, it is gathered anew into another buffer. A plan
    may gather twice, so it takes no buffer that the one plan in flight can be using.

    Attributes:
        rows: int32[n].
        kv_lens: int32[n], tokens of each sequence whose KV is planned: the position of the next one.
        slots: int64[n], pool slot of the newest one.
        generated: int32[n], output tokens planned so far.
        limits: int32[n], max_new_tokens.
        stale: set when rows ended or pages changed, so that the next plan gathers anew.
    """

    def __init__(self, table: RequestTable, page_size: int) -> None:
        self._table = table
        self._page_size = page_size
        self._buffers = PlanBuffers()
        self._gathered: Int32Array = np.empty((0, 0), dtype=np.int32)
        self.rows: Int32Array = np.empty(0, dtype=np.int32)
        self.kv_lens: Int32Array = np.empty(0, dtype=np.int32)
        self.slots: Int64Array = np.empty(0, dtype=np.int64)
        self.generated: Int32Array = np.empty(0, dtype=np.int32)
        self.limits: Int32Array = np.empty(0, dtype=np.int32)
        self.stale = False
        self._steps_left = _NEVER
        self._longest = 0

    def __len__(self) -> int:
        return len(self.rows)

    def join(self, rows: Int32Array, kv_lens: Int32Array, slots: Int64Array, generated: Int32Array) -> None:
        """Append rows whose first token is being drawn by the plan under construction.

        Args:
            rows, kv_lens, generated: int32[m]; slots: int64[m], as the attributes, after that plan.
        """
        self.rows = np.concatenate((self.rows, rows))
        self.kv_lens = np.concatenate((self.kv_lens, kv_lens))
        self.slots = np.concatenate((self.slots, slots))
        self.generated = np.concatenate((self.generated, generated))
        self.limits = np.concatenate((self.limits, self._table.params["max_new_tokens"][rows]))
        self.stale = True

    def take_tally(self, row: int) -> list[int] | None:
        """What became of the guesses of a row that is leaving; None where nobody guesses (``RequestTimeline``)."""
        return None

    def refresh(self) -> None:
        """Drop rows that ended or have all their tokens planned, and gather the page table if anything changed."""
        if not self.stale and self._steps_left > 0:
            return
        keep = self._table.live.take(self.rows) & (self.generated < self.limits)
        if not keep.all():
            self.rows = self.rows[keep]
            self.kv_lens = self.kv_lens[keep]
            self.slots = self.slots[keep]
            self.generated = self.generated[keep]
            self.limits = self.limits[keep]
        self._steps_left = int((self.limits - self.generated).min()) if len(self.rows) else _NEVER
        self._longest = int(self.kv_lens.max()) if len(self.rows) else 0
        self._gather()
        self.stale = False

    def page_starts(self) -> Int64Array:
        """int64[k]: positions in the batch of the rows whose next token needs a new page."""
        size = self._page_size
        offsets = self.kv_lens & (size - 1) if size & (size - 1) == 0 else self.kv_lens % size
        return np.flatnonzero(offsets == 0)

    def advance(self, starts: Int64Array, pages: Int32Array) -> DecodeStep:
        """Plan one token for every row.

        Args:
            starts: ``page_starts()``.
            pages: int32[len(starts)], a new page for each.
        """
        positions = self.kv_lens
        self.slots = self.slots + 1
        if len(starts):
            self._append_pages(starts, pages)
        self.kv_lens = positions + np.int32(1)
        generated = self.generated
        self.generated = generated + np.int32(1)
        if len(self.rows):
            self._longest += 1
            self._steps_left -= 1
        width = -(-self._longest // self._page_size)
        return DecodeStep(self.rows, positions, self.kv_lens, generated, self.slots, self._gathered[:, :width])

    def _append_pages(self, starts: Int64Array, pages: Int32Array) -> None:
        rows = self.rows[starts]
        columns = self.kv_lens[starts] // self._page_size
        self._table.page_table[rows, columns] = pages
        self._table.num_pages[rows] = columns + 1
        self.slots[starts] = pages.astype(np.int64) * self._page_size
        if self._longest // self._page_size >= self._gathered.shape[1]:
            self._gather()
        else:
            self._gathered[starts, columns] = pages

    def _gather(self) -> None:
        """Copy the page tables of the rows into the next buffer, with room to grow."""
        table = self._table.page_table
        count = len(self.rows)
        width = min(self._longest // self._page_size + 1 + _GROWTH_COLUMNS, table.shape[1])
        self._gathered = self._buffers.take(count, width)
        if count:
            # A row's first columns as one opaque item: copying whole items is twice as fast as a two-axis gather.
            item = np.dtype((np.void, width * 4))
            source = np.ndarray((len(table),), dtype=item, buffer=table, strides=table.strides[:1])
            self._gathered.reshape(-1).view(item)[:] = source[self.rows]
