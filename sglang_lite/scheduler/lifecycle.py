"""Moves of a request between its states: start, preemption, end. The only place where rows change hands."""

from __future__ import annotations

from sglang_lite.scheduler.pages import PrefixUse
from sglang_lite.scheduler.request import Request, RequestState
from sglang_lite.scheduler.state import SchedulerState
from sglang_lite.types import FinishCode, Int32Array

_ABORTING_CODES = (
    FinishCode.ABORTED,
    FinishCode.WAITING_TIMEOUT,
    FinishCode.RUNNING_TIMEOUT,
    FinishCode.ERROR,
)


def start(state: SchedulerState, request: Request, prefix: PrefixUse, own: Int32Array, now: float) -> None:
    """A waiting request gets a row, its cached prefix and its own pages (int32[]), and joins the prefill."""
    state.queue.remove(request)
    state.queue.num_admitted += 1
    run(state, request, prefix, own, now)


def run(state: SchedulerState, request: Request, prefix: PrefixUse, own: Int32Array, now: float) -> None:
    """A request that is in no queue gets a row, and joins the prefill: at its head when its prompt is here already."""
    if state.queue.tenants is not None:
        # What a preemption makes compute again is not the tenant's fault.
        own_tokens = len(request.tokens) - prefix.start if request.started is None else 0
        state.queue.tenants.start(request.tenant, own_tokens)
    request.target = len(request.tokens)
    if request.cached_tokens < 0:
        request.cached_tokens = min(prefix.reported, request.prompt_length)
        state.counters.prompt_tokens += request.prompt_length
        state.counters.cached_tokens += request.cached_tokens
    request.timeline.start(now, state.waits, first=request.started is None)
    if request.started is None:
        request.started = now
        if state.config.running_timeout > 0:
            state.deadlines.add_total(request, now + state.config.running_timeout)
    state.table.assign(request)
    state.pages.attach(request, prefix, own)
    request.planned = request.computed = prefix.start
    state.prefilling.insert(0 if prefix.start >= request.prompt_length else len(state.prefilling), request)
    state.in_progress.add(request, state.table.known_tokens(request))


def preempt(state: SchedulerState, request: Request) -> None:
    """A running request without uncommitted plans gives up row and pages and waits at the head of its queue.

    Its tokens are kept, so that it resumes by computing prompt and output again, as far as the cache does not have
    them any more.
    """
    tokens = state.table.known_tokens(request).copy()
    state.counters.retractions += 1
    state.counters.retracted_input_tokens += request.prompt_length
    state.counters.retracted_output_tokens += len(tokens) - request.prompt_length
    _leave(state, request, RequestState.PENDING, written_tokens(state, request))
    request.retractions += 1
    request.tokens = tokens
    request.timeline.queue(state.now, state.waits)
    state.queue.push(request)


def end(state: SchedulerState, request: Request, code: FinishCode, *, keep: bool) -> None:
    """A live request ends, wherever it stands; what it has in flight is dropped. Reports nothing.

    Args:
        keep: publish its full pages (a normal end) instead of freeing them.
    """
    if request.state is not RequestState.DECODE:
        note_timeline(state, request)
    after = RequestState.ABORTED if code in _ABORTING_CODES else RequestState.FINISHED
    if request.has_peer:
        state.transfers.ended.append(request.key)
    if request.waiting:
        state.queue.remove(request)
        request.state = after
    elif request.state is RequestState.HELD:
        state.transfers.forget(request)
        state.pages.return_incoming(request)
        request.state = after
    else:
        _leave(state, request, after, written_tokens(state, request) if keep else 0)
        if request.timeline.guessed:
            note_timeline(state, request)
    del state.requests[request.key]
    state.counters.finished[code] += 1


def note_timeline(state: SchedulerState, request: Request) -> None:
    """Send the record of a request with the next outputs."""
    state.timelines[request.key] = request.timeline.record(request, state.now, state.waits)


def written_tokens(state: SchedulerState, request: Request) -> int:
    """Positions of a running request whose KV committed plans have written."""
    if request.computed < request.target:
        return request.computed
    # The newest output token was drawn but not fed yet.
    return max(int(state.table.length[request.row]) - 1, request.target)


def _leave(state: SchedulerState, request: Request, after: RequestState, num_written: int) -> None:
    if (tally := state.decode.take_tally(request.row)) is not None:
        request.timeline.add_guesses(tally)
    if request.planned < request.target:
        state.prefilling.remove(request)
    if state.queue.tenants is not None:
        state.queue.tenants.stop(request.tenant)
    state.in_progress.remove(request)
    if state.last_step is not None:
        state.stale_step = state.last_step
    state.pages.release(request, num_written)
    state.table.vacate(request, after, state.last_step)
    state.decode.stale = True
