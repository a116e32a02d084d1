"""The commit: tokens of a plan into the table, ends of requests, and the columns that are sent."""

from __future__ import annotations

import numpy as np

from sglang_lite.scheduler import lifecycle
from sglang_lite.scheduler.finish import finish_codes
from sglang_lite.scheduler.logprobs import logprob_records
from sglang_lite.scheduler.outputs import Outbox, concatenate_outputs
from sglang_lite.scheduler.plan import StepOutput
from sglang_lite.scheduler.request import Request, RequestState
from sglang_lite.scheduler.state import Chunk, InFlight, SchedulerState
from sglang_lite.scheduler.verified import commit_verified, ending_requests
from sglang_lite.types import FinishCode, Int32Array, OutputColumns


def commit(state: SchedulerState, output: StepOutput) -> OutputColumns:
    """Apply the result of the oldest uncommitted plan.

    Rows whose request ended since the plan was made are dropped: nothing of them is sent.

    Raises:
        ValueError: the output is not that plan's.
    """
    in_flight = _take_oldest(state, output.step)
    if len(output.tokens if output.counts is None else output.counts) != len(in_flight.sample.rows):
        raise ValueError(f"step {output.step}: {len(output.tokens)} tokens for {len(in_flight.sample.rows)} rows")
    records = logprob_records(state, in_flight, output)
    if output.counts is None:
        columns, ending = _commit_tokens(state, in_flight, output.tokens)
    else:
        columns, ending = commit_verified(state, in_flight, output.tokens, output.counts)
    columns.logprobs = records
    prefill_only = _commit_chunks(state, in_flight.chunks)
    for request, code in ending:
        lifecycle.end(state, request, code, keep=code != FinishCode.ERROR)
    state.table.reclaim_rows(output.step)
    return concatenate_outputs(columns, prefill_only) if len(prefill_only) else columns


def fail(state: SchedulerState, step: int, message: str) -> OutputColumns:
    """End every request of the oldest uncommitted plan with an error; its pages are not kept."""
    in_flight = _take_oldest(state, step)
    outbox = Outbox()
    state.counters.failed_steps += 1
    requests = {chunk.row: chunk.request for chunk in in_flight.chunks if chunk.is_running}
    for row, serial in zip(in_flight.sample.rows.tolist(), in_flight.sample.serials.tolist(), strict=True):
        request = state.table.requests[row]
        if request is not None and state.table.serial[row] == serial:
            requests[row] = request
    for request in requests.values():
        lifecycle.end(state, request, FinishCode.ERROR, keep=False)
        outbox.add(request, FinishCode.ERROR, message)
    state.table.reclaim_rows(step)
    return outbox.drain()


def _take_oldest(state: SchedulerState, step: int) -> InFlight:
    if not state.in_flight or state.in_flight[0].plan.step != step:
        expected = state.in_flight[0].plan.step if state.in_flight else "none"
        raise ValueError(f"result of step {step} came, but the oldest uncommitted plan is {expected}")
    return state.in_flight.popleft()


def _commit_tokens(
    state: SchedulerState, in_flight: InFlight, tokens: Int32Array
) -> tuple[OutputColumns, list[tuple[Request, FinishCode]]]:
    """Store the tokens and find the rows that end. The ends themselves come after the chunks are committed."""
    sample, table = in_flight.sample, state.table
    kv_lens = in_flight.kv_lens
    codes, matched = finish_codes(state, sample, in_flight.plan.generated, tokens)
    live = table.live.take(sample.rows)
    keys, cached, retractions = sample.keys, sample.cached_tokens, sample.retractions
    rows, base = sample.rows, sample.base
    if not live.all():
        rows, base, kv_lens, tokens, codes = rows[live], base[live], kv_lens[live], tokens[live], codes[live]
        keys, cached, retractions, matched = keys[live], cached[live], retractions[live], matched[live]
    table.flat_token_ids[base + kv_lens] = tokens
    table.length[rows] = kv_lens + np.int32(1)
    state.counters.generated_tokens += len(tokens)
    columns = OutputColumns(keys, tokens, codes, matched, cached, retractions)
    return columns, ending_requests(state, columns, rows) if codes.any() else []


def _commit_chunks(state: SchedulerState, chunks: list[Chunk]) -> OutputColumns:
    """Note what was computed, publish completed prompts, and end the requests that wanted no token."""
    outbox = Outbox()
    for chunk in chunks:
        if not chunk.is_running:
            continue
        request = chunk.request
        request.computed = chunk.stop
        request.timeline.add_chunk(chunk.stop - chunk.start)
        request.scored = max(request.scored, min(chunk.stop + 1, request.prompt_length))
        if request.lent:
            state.transfers.note_written(state.table, request, chunk.stop, completes=chunk.completes)
        if not chunk.completes:
            continue
        if not chunk.samples:
            lifecycle.end(state, request, FinishCode.LENGTH, keep=True)
            outbox.add(request, FinishCode.LENGTH)
            continue
        request.timeline.prefilled(state.now)
        lifecycle.note_timeline(state, request)
        state.table.set_state(request, RequestState.DECODE)
        if state.table.length[request.row] > chunk.stop and state.table.token_ids[request.row, chunk.stop] >= 0:
            state.decode.stale |= state.pages.publish(request, chunk.stop)
        state.in_progress.remove(request)
    return outbox.drain()
