"""Page metadata of a step in the form the paged kernels take: index pointers, indices, last page lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cuda.arena import SECTION_ALIGNMENT, Section, StepArena
from sglang_lite.types import Int32Array

_NUM_SECTIONS = 7


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The columns of a step on the host.

    Attributes:
        num_decode: the first ``num_decode`` rows have one query token each; the rest are prefill chunks.
        query_lens, kv_lens: int32[B]; a row's queries are the last of its ``kv_lens`` tokens.
        page_table: int32[B, W]; entries past a row's length are ignored.
        padded_rows: rows that the kernels see, at least B; the rows beyond B have one token in ``scratch_page``. Only
            for steps that are all decode.
        scratch_page: a page that no sequence owns.
        reserved_pages: least length of ``kv_indices``, for a captured graph that later reads more of them.
    """

    num_decode: int
    query_lens: Int32Array
    kv_lens: Int32Array
    page_table: Int32Array
    padded_rows: int = 0
    scratch_page: int = 0
    reserved_pages: int = 0

    @property
    def num_rows(self) -> int:
        """Rows that the kernels see."""
        return max(self.padded_rows, len(self.kv_lens))

    @property
    def num_tokens(self) -> int:
        """Query tokens, padding included."""
        return int(self.query_lens.sum()) + self.num_rows - len(self.kv_lens)


@dataclass(frozen=True, slots=True)
class PagedStep:
    """What the paged kernels need to know of a step.

    Attributes:
        num_decode, num_rows, num_tokens, page_size: extents; decode rows come first and have one token each.
        qo_indptr: int32[B + 1], first query token of each row.
        kv_indptr: int32[B + 1], first entry of each row in ``kv_indices``.
        last_page_len: int32[B], tokens in each row's last page, from 1 to ``page_size``.
        batch_indices, positions: int32[T], row of each token and its position in its sequence.
        kv_indices: int32[N], pages of all rows one after another.
        kv_lens: int32[B], tokens of each row after this step.
    """

    num_decode: int
    num_rows: int
    num_tokens: int
    page_size: int
    qo_indptr: Section
    kv_indptr: Section
    last_page_len: Section
    kv_lens: Section
    batch_indices: Section
    positions: Section
    kv_indices: Section


def arena_length(batch: HostBatch, page_size: int) -> int:
    """Elements that ``page_step`` reserves for a batch, alignment included."""
    pages = int((-(-batch.kv_lens // page_size)).sum()) + batch.num_rows - len(batch.kv_lens)
    return (
        max(pages, batch.reserved_pages)
        + 4 * batch.num_rows
        + 2
        + 2 * batch.num_tokens
        + _NUM_SECTIONS * SECTION_ALIGNMENT
    )


def page_step(batch: HostBatch, page_size: int, arena: StepArena) -> PagedStep:
    """Lay out a step's page metadata in an arena, which the caller uploads.

    The section whose length depends on the lengths of sequences comes last: the others lie at the same place for
    every step with the same number of rows and tokens.

    Raises:
        OperationInputError: contradictory columns.
    """
    num_real = len(batch.kv_lens)
    num_rows, num_tokens = batch.num_rows, batch.num_tokens
    padding = num_rows - num_real
    _check(batch, padding)
    num_pages = np.ones(num_rows, dtype=np.int32)
    np.floor_divide(batch.kv_lens + np.int32(page_size - 1), page_size, out=num_pages[:num_real])
    step = PagedStep(
        num_decode=batch.num_decode + padding,
        num_rows=num_rows,
        num_tokens=num_tokens,
        page_size=page_size,
        qo_indptr=arena.reserve(num_rows + 1),
        kv_indptr=arena.reserve(num_rows + 1),
        last_page_len=arena.reserve(num_rows),
        kv_lens=arena.reserve(num_rows),
        batch_indices=arena.reserve(num_tokens),
        positions=arena.reserve(num_tokens),
        kv_indices=arena.reserve(max(int(num_pages.sum()), batch.reserved_pages)),
    )
    _fill_rows(step, batch, num_pages, page_size)
    _fill_tokens(step, batch, padding)
    _fill_pages(step.kv_indices.array, batch, num_pages[:num_real])
    return step


def _check(batch: HostBatch, padding: int) -> None:
    num_real = len(batch.kv_lens)
    if not num_real or len(batch.query_lens) != num_real or len(batch.page_table) != num_real:
        raise OperationInputError(
            f"attention batch: {len(batch.query_lens)} query lengths, {num_real} sequence lengths and "
            f"{len(batch.page_table)} page table rows; they must be equal and at least 1"
        )
    if padding and batch.num_decode != num_real:
        raise OperationInputError(
            f"attention batch: only steps that are all decode can be padded, here {batch.num_decode} of {num_real} "
            "rows are decode rows"
        )
    if bool((batch.query_lens[: batch.num_decode] != 1).any()):
        raise OperationInputError("attention batch: a decode row must have exactly one query token")
    if bool((batch.query_lens < 1).any()) or bool((batch.kv_lens < batch.query_lens).any()):
        raise OperationInputError(
            "attention batch: a row needs at least one query token, and no more than its sequence has tokens"
        )


def _fill_rows(step: PagedStep, batch: HostBatch, num_pages: Int32Array, page_size: int) -> None:
    num_real = len(batch.kv_lens)
    kv_lens, last_page_len = step.kv_lens.array, step.last_page_len.array
    kv_lens[:num_real] = batch.kv_lens
    kv_lens[num_real:] = 1
    np.subtract(kv_lens, (num_pages - np.int32(1)) * np.int32(page_size), out=last_page_len)
    step.kv_indptr.array[0] = 0
    np.cumsum(num_pages, out=step.kv_indptr.array[1:])
    qo_indptr = step.qo_indptr.array
    if step.num_decode == step.num_rows:
        qo_indptr[:] = np.arange(step.num_rows + 1, dtype=np.int32)
    else:
        qo_indptr[0] = 0
        np.cumsum(batch.query_lens, out=qo_indptr[1:])


def _fill_tokens(step: PagedStep, batch: HostBatch, padding: int) -> None:
    if step.num_decode == step.num_rows:
        step.batch_indices.array[:] = step.qo_indptr.array[:-1]
        np.subtract(step.kv_lens.array, np.int32(1), out=step.positions.array)
        return
    rows = np.repeat(np.arange(step.num_rows, dtype=np.int32), batch.query_lens)
    step.batch_indices.array[:] = rows
    # The first token of a row stands at kv_len - query_len of its sequence.
    first = batch.kv_lens - batch.query_lens - step.qo_indptr.array[:-1]
    np.add(first[rows], np.arange(step.num_tokens, dtype=np.int32), out=step.positions.array)


def _fill_pages(indices: Int32Array, batch: HostBatch, num_pages: Int32Array) -> None:
    """The page tables of all rows one after another, each cut to its length; then one scratch page a padding row."""
    width = batch.page_table.shape[1]
    if int(num_pages.max()) > width:
        raise OperationInputError(
            f"attention batch: a row has {int(num_pages.max())} pages and the page table {width} columns"
        )
    pages = batch.page_table[np.arange(width, dtype=np.int32) < num_pages[:, None]]
    indices[: len(pages)] = pages
    indices[len(pages) :] = batch.scratch_page
