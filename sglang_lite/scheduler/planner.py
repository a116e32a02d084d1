"""The planner: one StepPlan from the decode batch and the prefill chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sglang_lite.scheduler import lifecycle, waits
from sglang_lite.scheduler.decode import DecodeStep
from sglang_lite.scheduler.drafting import DraftStep
from sglang_lite.scheduler.embeddings import embedded_tokens
from sglang_lite.scheduler.logprobs import logprob_requests
from sglang_lite.scheduler.plan import StepPlan
from sglang_lite.scheduler.prefill import select_chunks
from sglang_lite.scheduler.request import Special
from sglang_lite.scheduler.rows import RowAssembler
from sglang_lite.scheduler.sampling import SampleSet, gather_sample_set
from sglang_lite.scheduler.state import Chunk, InFlight, SchedulerState
from sglang_lite.types import FinishCode, Int32Array

_NO_COPIES: Int32Array = np.empty((0, 2), dtype=np.int32)


class Planner:
    """Makes plans; keeps what successive plans share."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._sample: SampleSet | None = None
        self._rows = RowAssembler(state)

    def plan(self, now: float) -> StepPlan | None:
        """Plan one step: all decode rows, then prefill within the budgets. None when nothing can run now.

        When pages are short and nothing is evictable, a request is preempted. One with a token in flight cannot be,
        so the plan is put off until the step in flight is committed.
        """
        state = self._state
        retractions = state.counters.retractions
        state.decode.refresh()
        starts = state.decode.page_starts()
        while not state.pages.reserve(len(starts)):
            if state.in_flight:
                state.waits.cause = waits.PAGES
                return None
            self._make_room()
            state.decode.refresh()
            starts = state.decode.page_starts()
        # Taken before anything is admitted, which could use up what was reserved.
        pages = state.pages.pool.allocate(len(starts))
        chunks, copies = select_chunks(state, now, admit=state.counters.retractions == retractions)
        if not chunks and not len(state.decode):
            return None
        decode = state.decode.advance(starts, pages)
        in_flight = self._assemble(decode, chunks, copies)
        self._join(chunks)
        state.next_step += 1
        state.in_flight.append(in_flight)
        self._count(decode, chunks)
        if state.queue.tenants is not None:
            state.queue.tenants.charge_outputs(state.table.tenant[in_flight.sample.rows])
        return in_flight.plan

    def _make_room(self) -> None:
        """Preempt the last request of the policy's order; never the first, which could then never finish."""
        state = self._state
        running = state.table.running()
        if len(running) > 1 or state.transfers.incoming() or len(state.pages.holds):
            # The only one does not have the pool to itself either: it goes on when transfers give their pages back.
            lifecycle.preempt(state, max(running, key=state.queue.rank))
            return
        request = running[0]
        length = int(state.table.length[request.row])
        message = (
            f"the KV pool of {state.config.num_pages * state.config.page_size} tokens is full at {length} tokens of "
            "this request; raise --max-total-tokens or lower max_new_tokens"
        )
        lifecycle.end(state, request, FinishCode.TOO_LONG, keep=True)
        state.outbox.add(request, FinishCode.TOO_LONG, message)

    def _assemble(self, decode: DecodeStep, chunks: list[Chunk], copies: list[tuple[int, int]]) -> InFlight:
        state = self._state
        count = len(decode.rows)
        drafts = decode.drafts if isinstance(decode, DraftStep) and decode.drafts.lens.any() else None
        sampling_chunks = [(count + index, chunk) for index, chunk in enumerate(chunks) if chunk.samples]
        columns = self._rows.columns(decode, chunks)
        if not sampling_chunks:
            sample_rows, sample_index = decode.rows, self._rows.positions[:count]
            generated, sample_lens = decode.generated, decode.kv_lens
        else:
            index = np.array([position for position, _ in sampling_chunks], dtype=np.int32)
            sample_index = np.concatenate((self._rows.positions[:count], index))
            sample_lens = np.concatenate((decode.kv_lens, columns.kv_lens[index]))
            outputs = [chunk.stop - chunk.request.prompt_length for _, chunk in sampling_chunks]
            generated = np.concatenate((decode.generated, np.array(outputs, dtype=np.int32)))
            sample_rows = np.concatenate(
                (decode.rows, np.array([chunk.row for _, chunk in sampling_chunks], dtype=np.int32))
            )
        sample = self._sample_set(sample_rows)
        logprobs, scored = logprob_requests(state, count, chunks, sample, sampling_chunks)
        plan = StepPlan(
            step=state.next_step,
            num_decode=count if drafts is None else drafts.num_plain,
            rows=columns.rows,
            query_lens=columns.query_lens,
            input_ids=columns.input_ids,
            positions=columns.positions,
            slot_mapping=columns.slots,
            kv_lens=columns.kv_lens,
            page_table=columns.page_table,
            sample_index=sample_index,
            sampling=sample.columns,
            generated=generated,
            suppressed=_suppressed(sample, generated),
            resumed=_resumed(state, sampling_chunks),
            page_copies=np.array(copies, dtype=np.int32) if copies else _NO_COPIES,
            logprobs=logprobs,
            draft_lens=None if drafts is None else _with_zeros(drafts.lens, len(sampling_chunks)),
            num_verify=0 if drafts is None else count - drafts.num_plain,
            matchers=sample.matchers,
            embedded=embedded_tokens(chunks, len(columns.input_ids)) if chunks else (),
            adapter_slots=state.table.adapter_slot[columns.rows] if state.table.num_adapted else None,
        )
        return InFlight(plan, sample, sample_lens, chunks, scored)

    def _sample_set(self, rows: Int32Array) -> SampleSet:
        """The columns of the sampling rows; the last ones again when the rows are the same."""
        last = self._sample
        if last is None or last.rows is not rows:
            if last is not None and self._same_requests(last, rows):
                last = replace(last, rows=rows)
            else:
                last = gather_sample_set(self._state.table, rows, self._state.config.eos_token_ids)
            self._sample = last
        return last

    def _same_requests(self, sample: SampleSet, rows: Int32Array) -> bool:
        """Whether ``rows`` are the rows of the set, and none was given to another request since."""
        return np.array_equal(sample.rows, rows) and np.array_equal(self._state.table.serial.take(rows), sample.serials)

    def _join(self, chunks: list[Chunk]) -> None:
        """Rows that draw their first token in this plan decode from the next one on."""
        sampling = [chunk for chunk in chunks if chunk.samples]
        if not sampling:
            return
        size, table = self._state.config.page_size, self._state.table.page_table
        last = [chunk.stop - 1 for chunk in sampling]
        slots = [
            int(table[chunk.row, position // size]) * size + position % size
            for chunk, position in zip(sampling, last, strict=True)
        ]
        self._state.decode.join(
            np.array([chunk.row for chunk in sampling], dtype=np.int32),
            np.array([chunk.stop for chunk in sampling], dtype=np.int32),
            np.array(slots, dtype=np.int64),
            np.array([chunk.stop - chunk.request.prompt_length + 1 for chunk in sampling], dtype=np.int32),
        )

    def _count(self, decode: DecodeStep, chunks: list[Chunk]) -> None:
        counters = self._state.counters
        counters.steps += 1
        counters.decode_steps += bool(len(decode.rows))
        counters.prefill_batches += bool(chunks)
        counters.computed_prompt_tokens += sum(chunk.stop - chunk.start for chunk in chunks)


def _with_zeros(column: Int32Array, count: int) -> Int32Array:
    return np.concatenate((column, np.zeros(count, dtype=np.int32))) if count else column


def _suppressed(sample: SampleSet, generated: Int32Array) -> dict[int, tuple[int, ...]]:
    return {position: ids for position, least, ids in sample.suppressions if generated[position] < least}


def _resumed(state: SchedulerState, sampling_chunks: list[tuple[int, Chunk]]) -> dict[int, Int32Array]:
    """Output so far of rows with penalties that sample for the first time, or again after a preemption."""
    return {
        chunk.row: state.table.token_ids[chunk.row, chunk.request.prompt_length : chunk.stop].copy()
        for _, chunk in sampling_chunks
        if chunk.request.special & Special.PENALTIES
    }
