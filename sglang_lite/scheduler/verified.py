"""The commit of a step that verified guesses: a row may have drawn several tokens."""

from __future__ import annotations

import numpy as np

from sglang_lite.scheduler.drafting import DraftingBatch
from sglang_lite.scheduler.finish import finish_codes
from sglang_lite.scheduler.outputs import NO_TOKEN
from sglang_lite.scheduler.request import Request
from sglang_lite.scheduler.state import InFlight, SchedulerState
from sglang_lite.types import FinishCode, Int32Array, Int64Array, OutputColumns

NAN_MESSAGE = "NaN happened: the logits of this request were not finite, or its grammar allows no token"


def commit_verified(
    state: SchedulerState, in_flight: InFlight, tokens: Int32Array, counts: Int32Array
) -> tuple[OutputColumns, list[tuple[Request, FinishCode]]]:
    """Store the tokens and find the rows that end; what a row drew behind its end is dropped.

    Args:
        tokens: int32[sum(counts)]; counts: int32[S], as in ``StepOutput``.
    """
    sample, table = in_flight.sample, state.table
    width = int(counts.max(initial=1))
    drawn = np.arange(width) < counts[:, None]
    grid: Int32Array = np.full(drawn.shape, NO_TOKEN, dtype=np.int32)
    grid[drawn] = tokens
    codes = np.zeros(drawn.shape, dtype=np.uint8)
    matched: Int32Array = np.full(drawn.shape, NO_TOKEN, dtype=np.int32)
    for step in range(width):
        generated = in_flight.plan.generated + np.int32(step)
        codes[:, step], matched[:, step] = finish_codes(state, sample, generated, grid[:, step])
    ends = (codes != 0) & drawn
    sent = drawn & (np.cumsum(ends, axis=1) - ends == 0) & table.live.take(sample.rows)[:, None]
    _learn(state, in_flight, counts, np.count_nonzero(sent, axis=1))
    row, place = np.nonzero(sent)
    rows = sample.rows[row]
    table.flat_token_ids[sample.base[row] + in_flight.kv_lens[row] + place] = grid[sent]
    # Of the lengths of one row the last one stays: numpy assigns in order.
    table.length[rows] = in_flight.kv_lens[row] + place + 1
    state.counters.generated_tokens += len(row)
    columns = OutputColumns(
        sample.keys[row], grid[sent], codes[sent], matched[sent], sample.cached_tokens[row], sample.retractions[row]
    )
    return columns, ending_requests(state, columns, rows)


def ending_requests(
    state: SchedulerState, columns: OutputColumns, rows: Int32Array
) -> list[tuple[Request, FinishCode]]:
    """The requests whose rows (int32[N], of ``columns``) have a finish code; adds the messages of errors."""
    ending: list[tuple[Request, FinishCode]] = []
    for index in np.flatnonzero(columns.finish).tolist():
        request = state.table.requests[rows[index]]
        assert request is not None
        code = FinishCode(int(columns.finish[index]))
        ending.append((request, code))
        if code == FinishCode.ERROR:
            columns.messages[request.key] = NAN_MESSAGE
    return ending


def _learn(state: SchedulerState, in_flight: InFlight, counts: Int32Array, sent: Int64Array) -> None:
    """Adapt the rows' limits, and count; guesses behind a request's end were right but are no part of it.

    Args:
        sent: int64[S], tokens of each row that go to its client.
    """
    drafted = in_flight.plan.draft_lens
    if drafted is None or not isinstance(state.decode, DraftingBatch):
        return
    accepted = np.minimum(counts - 1, drafted)
    state.decode.learn(in_flight.sample.rows, drafted, accepted)
    state.counters.drafted_tokens += int(drafted.sum())
    state.counters.accepted_tokens += int(np.minimum(accepted, sent).sum())
    state.counters.verified_rows += int(np.count_nonzero(drafted))
