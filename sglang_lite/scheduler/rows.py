"""Columns of a plan's rows: the decode rows as they are, followed by the prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_lite.scheduler.decode import DecodeStep, PlanBuffers
from sglang_lite.scheduler.drafting import DraftStep
from sglang_lite.scheduler.plan import FROM_DEVICE
from sglang_lite.scheduler.state import Chunk, SchedulerState
from sglang_lite.types import Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Columns of B rows and T tokens, as in ``StepPlan``.

    Attributes:
        rows, query_lens, kv_lens: int32[B]; page_table: int32[B, W].
        input_ids, positions: int32[T]; slots: int64[T].
    """

    rows: Int32Array
    query_lens: Int32Array
    kv_lens: Int32Array
    page_table: Int32Array
    input_ids: Int32Array
    positions: Int32Array
    slots: Int64Array


class RowAssembler:
    """Puts the two parts of a plan together; a plan without chunks costs no copy.

    Attributes:
        positions: int32[max_running_requests], 0, 1, 2, ...: read-only.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._buffers = PlanBuffers()
        count = state.config.max_running_requests
        self.positions: Int32Array = np.arange(count, dtype=np.int32)
        self._from_device: Int32Array = np.full(count, FROM_DEVICE, dtype=np.int32)
        self._ones: Int32Array = np.ones(count, dtype=np.int32)
        for shared in (self.positions, self._from_device, self._ones):
            shared.setflags(write=False)

    def columns(self, decode: DecodeStep, chunks: list[Chunk]) -> RowColumns:
        """Columns of the decode rows and the chunks."""
        count = len(decode.rows)
        if isinstance(decode, DraftStep):
            drafted = RowColumns(
                rows=decode.rows,
                query_lens=decode.drafts.lens + self._ones[:count],
                kv_lens=decode.kv_lens + decode.drafts.lens,
                page_table=decode.page_table,
                input_ids=decode.drafts.input_ids,
                positions=decode.drafts.positions,
                slots=decode.drafts.slots,
            )
            return self._with_chunks(drafted, chunks) if chunks else drafted
        only_decode = RowColumns(
            rows=decode.rows,
            query_lens=self._ones[:count],
            kv_lens=decode.kv_lens,
            page_table=decode.page_table,
            input_ids=self._from_device[:count],
            positions=decode.positions,
            slots=decode.slots,
        )
        return self._with_chunks(only_decode, chunks) if chunks else only_decode

    def _with_chunks(self, decode: RowColumns, chunks: list[Chunk]) -> RowColumns:
        size, table = self._state.config.page_size, self._state.table
        kv_lens = _append(decode.kv_lens, [chunk.stop for chunk in chunks])
        input_ids, positions, slots = [decode.input_ids], [decode.positions], [decode.slots]
        for chunk in chunks:
            computed = np.arange(chunk.start, chunk.stop, dtype=np.int32)
            pages = table.page_table[chunk.row, computed // size].astype(np.int64)
            input_ids.append(table.token_ids[chunk.row, chunk.start : chunk.stop])
            positions.append(computed)
            slots.append(pages * size + computed % size)
        return RowColumns(
            rows=_append(decode.rows, [chunk.row for chunk in chunks]),
            query_lens=_append(decode.query_lens, [chunk.stop - chunk.start for chunk in chunks]),
            kv_lens=kv_lens,
            page_table=self._page_table(decode.page_table, chunks, -(-int(kv_lens.max()) // size)),
            input_ids=np.concatenate(input_ids),
            positions=np.concatenate(positions),
            slots=np.concatenate(slots),
        )

    def _page_table(self, decode: Int32Array, chunks: list[Chunk], width: int) -> Int32Array:
        """int32[B, width]; 0 beyond a chunk's pages."""
        count, decode_width = decode.shape
        page_table = self._buffers.take(count + len(chunks), width)
        page_table[:count, :decode_width] = decode
        page_table[:count, decode_width:] = 0
        for index, chunk in enumerate(chunks, start=count):
            used = -(-chunk.stop // self._state.config.page_size)
            page_table[index, :used] = self._state.table.page_table[chunk.row, :used]
            page_table[index, used:] = 0
        return page_table


def _append(column: Int32Array, values: list[int]) -> Int32Array:
    return np.concatenate((column, np.array(values, dtype=np.int32)))
