"""What the role of a server asks of its scheduler: let held requests go, reserve pages, join prompts that arrived."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_lite.scheduler import lifecycle
from sglang_lite.scheduler.pages import PrefixUse
from sglang_lite.scheduler.request import Request, RequestState
from sglang_lite.scheduler.state import SchedulerState
from sglang_lite.scheduler.transfers import NO_PAGES
from sglang_lite.types import FinishCode, Int32Array, LogprobRecord, OutputColumns


def hold(state: SchedulerState, request: Request) -> None:
    """A new request waits for its peer instead of in the queue."""
    request.state = RequestState.HELD
    state.transfers.held[request.key] = request


def release_held(state: SchedulerState, key: int, *, lent: bool) -> bool:
    """Let a held request wait in the queue, to be computed here. False when it is not held any more.

    Args:
        lent: a peer reads its pages as they are written. Otherwise nobody has a part in it any more, but for pages
            that were reserved: those are held.
    """
    request = state.transfers.held.pop(key, None)
    if request is None:
        return False
    state.pages.return_incoming(request)
    request.lent = lent
    request.has_peer = lent
    request.state = RequestState.NEW
    request.admitted_before = state.queue.num_admitted
    state.queue.push(request)
    return True


def without_pages(state: SchedulerState) -> list[int]:
    """Keys of held requests for which no pages are reserved, in the order of the policy."""
    waiting = [request for request in state.transfers.held.values() if request.incoming is None]
    return [request.key for request in state.queue.ordered(waiting)]


def reserve_incoming(state: SchedulerState, key: int) -> Int32Array | None:
    """Pages that the prompt of a held request is to be written to, or None while they cannot be spared.

    One more position than the prompt has finds room, for the token that follows it.
    """
    request = state.transfers.held.get(key)
    if request is None or request.incoming is not None or state.paused is not None or len(state.queue):
        return None
    size = state.config.page_size
    needed = -(-(request.prompt_length + (1 if request.max_new_tokens > 1 else 0)) // size)
    sharing = state.table.num_live + len(state.transfers.incoming())
    kept = sharing * -(-state.config.reserved_decode_tokens // size)
    if state.pages.num_available < needed + kept or not state.pages.reserve(needed):
        return None
    request.incoming = state.pages.pool.allocate(needed)
    state.queue.num_admitted += 1
    request.lent = True
    request.scored = request.prompt_length  # the prefill side has scored the prompt, and tells its own client
    return request.incoming[: -(-request.prompt_length // size)]


def join(state: SchedulerState, key: int, token: int, code: FinishCode, matched: int, cached_tokens: int,
         logprobs: Sequence[LogprobRecord]) -> bool:  # fmt: skip
    """The prompt of a held request has arrived, and its first token. False when the request is not held any more.

    Args:
        token: -1 when none was wanted.
        code: ``STOP_TOKEN`` when that token ends it, with ``matched``; ``ERROR`` when there is none.
        cached_tokens: of the prompt, where it was computed.
        logprobs: records of that token.
    """
    request = state.transfers.held.get(key)
    if request is None or request.incoming is None:
        return False
    request.lent = request.has_peer = False
    request.cached_tokens = cached_tokens
    if code == FinishCode.RUNNING and request.max_new_tokens <= 1:
        code = FinishCode.LENGTH
    if code == FinishCode.RUNNING and token < 0:
        code = FinishCode.ERROR
    if code == FinishCode.RUNNING and request.matcher is not None and not request.matcher.accept(token):
        code = FinishCode.ERROR
    state.counters.generated_tokens += token >= 0
    state.transfers.report(_row(request, token, code, matched, logprobs))
    if code != FinishCode.RUNNING:
        lifecycle.end(state, request, code, keep=False)
        return True
    tokens: Int32Array = np.append(request.tokens, np.int32(token)).astype(np.int32)
    request.tokens = tokens
    del state.transfers.held[key]
    state.transfers.arrived.append(request)
    return True


def start_arrived(state: SchedulerState, now: float) -> None:
    """Give rows to requests whose prompts are here; they go on behind their first token."""
    while state.transfers.arrived and state.table.num_free_rows:
        request = state.queue.ordered(state.transfers.arrived)[0]
        own = request.incoming
        if own is None:
            raise ValueError(f"request {request.key} has arrived without pages")
        state.transfers.forget(request)
        request.incoming = None
        start = request.prompt_length
        lifecycle.run(state, request, PrefixUse(NO_PAGES, start, request.cached_tokens, -1), own, now)


def _row(
    request: Request, token: int, code: FinishCode, matched: int, logprobs: Sequence[LogprobRecord]
) -> OutputColumns:
    return OutputColumns(
        key=np.array([request.key], dtype=np.int64),
        token=np.array([token], dtype=np.int32),
        finish=np.array([code], dtype=np.uint8),
        matched=np.array([matched], dtype=np.int32),
        cached_tokens=np.array([max(request.cached_tokens, 0)], dtype=np.int32),
        retractions=np.array([min(request.retractions, 255)], dtype=np.uint8),
        logprobs=list(logprobs),
    )
