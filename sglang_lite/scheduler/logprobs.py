"""Log-probabilities: what a plan has to score, and the records made of the scores."""

from __future__ import annotations

import numpy as np

from sglang_lite.scheduler.plan import LogprobRequest, ScoredPositions, StepOutput
from sglang_lite.scheduler.request import Request, Special
from sglang_lite.scheduler.sampling import SampleSet
from sglang_lite.scheduler.state import Chunk, InFlight, SchedulerState
from sglang_lite.types import Int32Array, LogprobRecord, RequestFlags


def logprob_requests(
    state: SchedulerState,
    num_decode: int,
    chunks: list[Chunk],
    sample: SampleSet,
    sampling_chunks: list[tuple[int, Chunk]],
) -> tuple[list[LogprobRequest], list[Request]]:
    """What to score: prompt positions of chunks, and sampled tokens of rows that want log-probabilities."""
    if not sample.scored and not any(chunk.request.special & Special.LOGPROBS for chunk in chunks):
        return [], []
    wanted: dict[int, tuple[Request, int, int, bool]] = {}
    plan_index = [position for position, _ in sampling_chunks]
    for position, request in sample.scored:
        row_index = position if position < num_decode else plan_index[position - num_decode]
        wanted[row_index] = (request, 0, 0, True)
    for index, chunk in enumerate(chunks):
        request = chunk.request
        # The state at p - 1 scores position p, so a chunk scores up to the first position of the next one.
        begin = max(chunk.start + 1, request.scored)
        stop = min(chunk.stop + 1, request.prompt_length)
        if request.special & Special.LOGPROBS and begin < stop:
            row_index = num_decode + index
            wanted[row_index] = (request, begin, stop, row_index in wanted)
    logprobs = []
    for row_index in sorted(wanted):
        request, begin, stop, output = wanted[row_index]
        prompt = state.table.token_ids[request.row, begin:stop].copy()
        top = int(request.params["top_logprobs"])
        ids = request.extras.token_ids_logprob
        hidden = bool(request.params["flags"] & RequestFlags.HIDDEN_STATES)
        logprobs.append(LogprobRequest(row_index, request.key, begin, stop, prompt, output, top, ids, hidden))
    return logprobs, [wanted[row_index][0] for row_index in sorted(wanted)]


def logprob_records(state: SchedulerState, in_flight: InFlight, output: StepOutput) -> list[LogprobRecord]:
    """Records of a plan's scores, for the requests that still run. Called before its tokens are committed."""
    records = [
        _unscored(chunk.request.key, state.table.token_ids[chunk.row, :1].copy())
        for chunk in in_flight.chunks
        if chunk.start == 0 and chunk.request.scored == 0 and chunk.is_running
    ]
    for wanted, request, scores in zip(in_flight.plan.logprobs, in_flight.scored, output.scored, strict=True):
        row = int(in_flight.plan.rows[wanted.row_index])
        if not request.running or request.row != row:
            continue
        count = wanted.prompt_stop - wanted.prompt_start
        if count:
            records.append(_record(request.key, True, wanted.prompt_token_ids, scores, 0, count))
        if wanted.output:
            position = int(np.searchsorted(in_flight.plan.sample_index, wanted.row_index))
            # A row with scores draws one token, whatever the others draw.
            start = position if output.counts is None else int(output.counts[:position].sum())
            token = output.tokens[start : start + 1]
            if token[0] >= 0:
                records.append(_record(request.key, False, token, scores, count, count + 1))
    return records


def _record(
    key: int, prompt: bool, token_ids: Int32Array, scores: ScoredPositions, start: int, stop: int
) -> LogprobRecord:
    return LogprobRecord(
        key=key,
        prompt=prompt,
        token_ids=token_ids,
        logprobs=scores.logprobs[start:stop],
        top_ids=scores.top_ids[start:stop],
        top_logprobs=scores.top_logprobs[start:stop],
        extra_logprobs=scores.extra_logprobs[start:stop],
        hidden=scores.hidden[start:stop],
    )


def _unscored(key: int, token_ids: Int32Array) -> LogprobRecord:
    """The first prompt token: nothing comes before it, so it has no log-probability."""
    return LogprobRecord(
        key=key,
        prompt=True,
        token_ids=token_ids,
        logprobs=np.full(1, np.nan, dtype=np.float32),
        top_ids=np.empty((1, 0), dtype=np.int32),
        top_logprobs=np.empty((1, 0), dtype=np.float32),
        extra_logprobs=np.empty((1, 0), dtype=np.float32),
        hidden=np.empty((1, 0), dtype=np.float32),
    )
