"""The decode batch with drafts: a row feeds its newest token and guesses at what follows, to be verified in one step.

The next plan needs the tokens of the last one on the host, so there is one plan at a time. Rejected tokens leave
nothing behind: the sequence's length says what is real, and the next step writes over their slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_lite.scheduler.config import SchedulerConfig
from sglang_lite.scheduler.decode import DecodeBatch, DecodeStep
from sglang_lite.scheduler.ngram import NgramIndex
from sglang_lite.scheduler.pages import RequestPages
from sglang_lite.scheduler.plan import FROM_DEVICE
from sglang_lite.scheduler.request import Special
from sglang_lite.scheduler.table import RequestTable
from sglang_lite.types import Int32Array, Int64Array

_NEVER_DRAFTED = Special.LOGPROBS | Special.PENALTIES | Special.MIN_TOKENS
"""Rows whose draw depends on the draws before it in more than their tokens are decoded one token at a time."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses of one step, for the rows of a ``DecodeStep``; rows without any come first.

    Attributes:
        lens: int32[n], guessed tokens.
        num_plain: rows without guesses.
        input_ids, positions: int32[T], slots: int64[T]: each row's newest token and its guesses.
    """

    lens: Int32Array
    num_plain: int
    input_ids: Int32Array
    positions: Int32Array
    slots: Int64Array


@dataclass(frozen=True, slots=True)
class DraftStep(DecodeStep):
    """A ``DecodeStep`` whose rows may feed more than one token; its columns are those of the newest tokens."""

    drafts: Drafts


class DraftingBatch(DecodeBatch):
    """See ``DecodeBatch``; its columns are taken from the table anew for every plan.

    Args:
        pages: guesses take free pages, and never those of another request.
        config: who guesses, and how much at most. A row's own limit follows its luck.
    """

    def __init__(self, table: RequestTable, pages: RequestPages, config: SchedulerConfig) -> None:
        super().__init__(table, config.page_size)
        self._pages = pages
        self._most = most = config.draft_tokens
        self._verified_tokens = config.verified_tokens
        self._index = None if config.executor_drafts else NgramIndex(table)
        # What the executor guesses knows no grammar.
        self._never = _NEVER_DRAFTED | Special.GRAMMAR if config.executor_drafts else _NEVER_DRAFTED
        self._allowed: Int32Array = np.full(table.capacity, most, dtype=np.int32)
        # Of each row: guesses made, and steps in which 0, 1, .. of them were right.
        self._tally: Int32Array = np.zeros((table.capacity, most + 2), dtype=np.int32)
        self._lens: Int32Array = np.empty(0, dtype=np.int32)
        self._guesses: Int32Array = np.empty((0, most), dtype=np.int32)

    def join(self, rows: Int32Array, kv_lens: Int32Array, slots: Int64Array, generated: Int32Array) -> None:
        """See ``DecodeBatch.join``."""
        super().join(rows, kv_lens, slots, generated)
        if self._index is not None:
            self._index.restart(rows)
        self._allowed[rows] = self._most

    def learn(self, rows: Int32Array, drafted: Int32Array, accepted: Int32Array) -> None:
        """How many of the guesses of these rows were right: int32[m] each. Luck doubles a row's limit."""
        tried = drafted > 0
        doubled = np.minimum(2 * np.maximum(drafted, 1), self._most)
        self._allowed[rows[tried]] = np.where(accepted >= drafted, doubled, accepted + 1)[tried]
        self._tally[rows, 0] += drafted
        self._tally[rows[tried], 1 + accepted[tried]] += 1

    def take_tally(self, row: int) -> list[int] | None:
        """See ``DecodeBatch.take_tally``."""
        tally: list[int] = self._tally[row].tolist()
        self._tally[row] = 0
        return tally if tally[0] else None

    def refresh(self) -> None:
        """Take the rows' lengths from the table, drop those that ended, and guess."""
        table = self._table
        keep = table.live.take(self.rows)
        rows = self.rows[keep]
        lengths = table.length.take(rows)
        progress = lengths - 1 - self.kv_lens[keep]
        generated = self.generated[keep] + progress
        limits = self.limits[keep]
        share = max(0, self._verified_tokens // max(1, len(rows)) - 1)
        has_draft = np.full(len(rows), self._index is None)
        guesses: Int32Array = np.full((len(rows), self._most), FROM_DEVICE, dtype=np.int32)
        if share and self._index is not None:  # what is not indexed now is when there is room for guesses again
            self._index.extend(rows, lengths)
            has_draft, guesses = self._index.draft(rows, lengths, self._most)
        allowed = self._allowed.take(rows)
        if share and self._index is not None:
            self._force(rows, has_draft, guesses, allowed)
        # The step itself draws one token more than it guesses.
        lens = np.minimum(np.minimum(allowed, share), limits - generated - 1)
        lens = np.where(has_draft & ((table.special.take(rows) & self._never) == 0), np.maximum(lens, 0), 0)
        order = np.argsort(lens > 0, kind="stable")
        self.rows, self.limits = _same_or(self.rows, rows[order]), limits[order]
        self.kv_lens, self.generated = (lengths - 1)[order].astype(np.int32), generated[order].astype(np.int32)
        self.slots = np.zeros(len(rows), dtype=np.int64)
        self._lens, self._guesses = lens[order].astype(np.int32), guesses[order]
        self.stale = False

    def _force(
        self, rows: Int32Array, has_draft: npt.NDArray[np.bool_], guesses: Int32Array, allowed: Int32Array
    ) -> None:
        """Where a grammar leaves one text to go on with, that is the guess, however lucky the row was before."""
        for place in np.flatnonzero(self._table.special.take(rows) & Special.GRAMMAR).tolist():
            request = self._table.requests[rows[place]]
            if request is None or request.matcher is None:
                continue
            forced = request.matcher.forced()[: self._most]
            if forced:
                guesses[place, : len(forced)] = forced
                has_draft[place], allowed[place] = True, len(forced)

    def page_starts(self) -> Int64Array:
        """int64[k]: positions in the batch of the rows that own no slot for their newest token."""
        return np.flatnonzero(self._table.num_pages.take(self.rows) * self._page_size <= self.kv_lens)

    def advance(self, starts: Int64Array, pages: Int32Array) -> DecodeStep:
        """Plan one token and the guesses for every row; see ``DecodeBatch.advance``."""
        rows, kv_lens, generated = self.rows, self.kv_lens, self.generated
        if len(starts):
            self._add_pages(rows[starts], np.ones(len(starts), dtype=np.int64), pages)
        lens = self._fit_guesses()
        self.kv_lens = kv_lens + np.int32(1)
        self.generated = generated + np.int32(1)
        self._longest = int((self.kv_lens + lens).max()) if len(rows) else 0
        self._gather()
        width = -(-self._longest // self._page_size)
        drafts = self._feed(rows, kv_lens, lens)
        newest = np.cumsum(lens + 1) - lens - 1
        return DraftStep(
            rows, kv_lens, self.kv_lens, generated, drafts.slots[newest], self._gathered[:, :width], drafts
        )

    def _fit_guesses(self) -> Int32Array:
        """int32[n]: the guesses that there are pages for; the pages are taken."""
        rows, size = self.rows, self._page_size
        owned = self._table.num_pages.take(rows).astype(np.int64)
        wanted = np.maximum(-(-(self.kv_lens + 1 + self._lens) // size) - owned, 0)
        wanted[np.cumsum(wanted) > self._pages.pool.num_free] = 0
        total = int(wanted.sum())
        if total:
            self._add_pages(rows, wanted, self._pages.pool.allocate(total))
        room = (owned + wanted) * size - self.kv_lens - 1
        fitting: Int32Array = np.minimum(self._lens, room).astype(np.int32)
        return fitting

    def _add_pages(self, rows: Int32Array, counts: Int64Array, pages: Int32Array) -> None:
        """Append ``counts[i]`` of the pages to the page table of ``rows[i]``."""
        table = self._table
        owners = np.repeat(rows, counts)
        ends = np.cumsum(counts)
        columns = np.repeat(table.num_pages.take(rows) - (ends - counts), counts) + np.arange(len(pages))
        table.page_table[owners, columns] = pages
        table.num_pages[rows] += counts.astype(np.int32)

    def _feed(self, rows: Int32Array, kv_lens: Int32Array, lens: Int32Array) -> Drafts:
        counts = lens + 1
        ends = np.cumsum(counts)
        owners = np.repeat(np.arange(len(rows)), counts)
        offsets = np.arange(len(owners)) - np.repeat(ends - counts, counts)
        positions = np.repeat(kv_lens, counts) + offsets
        newest = self._table.token_ids[rows, kv_lens]
        guesses = self._guesses[owners, np.maximum(offsets - 1, 0)]
        pages = self._gathered[owners, positions // self._page_size].astype(np.int64)
        return Drafts(
            lens=lens,
            # A guess that found no page leaves a row of one token among those with guesses, which is as good.
            num_plain=int(np.argmax(lens > 0)) if lens.any() else len(rows),
            input_ids=np.where(offsets == 0, newest[owners], guesses).astype(np.int32),
            positions=positions.astype(np.int32),
            slots=pages * self._page_size + positions % self._page_size,
        )


def _same_or(old: Int32Array, new: Int32Array) -> Int32Array:
    """``old`` itself when nothing changed, because what is cached for it stays valid."""
    return old if np.array_equal(old, new) else new
