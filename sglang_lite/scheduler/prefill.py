"""Which prompts are computed in a step: chunks of the running prefills first, then new requests from the queue."""

from __future__ import annotations

from sglang_lite.scheduler import handover, lifecycle, waits
from sglang_lite.scheduler.pages import PrefixUse
from sglang_lite.scheduler.request import Request
from sglang_lite.scheduler.state import Chunk, SchedulerState

_UNLIMITED = 2**62
_MIN_SHARE = 8
"""Prefill may use at least this fraction (1/8) of the step's tokens, however many rows decode."""

_HEADROOM_TOKENS = 16
"""Tokens that every running request should be able to grow by before another one is admitted."""


def select_chunks(state: SchedulerState, now: float, *, admit: bool) -> tuple[list[Chunk], list[tuple[int, int]]]:
    """Choose the prefill part of a plan.

    Args:
        admit: whether new requests may start (not right after a preemption, which they would only repeat).

    Returns:
        The chunks, and the (source, destination) pages to copy before the pass.
    """
    handover.start_arrived(state, now)
    budget = token_budget(state)
    limit = state.config.prefill_max_requests or _UNLIMITED
    chunks: list[Chunk] = []
    copies: list[tuple[int, int]] = []
    for request in state.prefilling[: min(limit, len(state.prefilling))]:
        if budget <= 0:
            break
        chunks.append(_next_chunk(request, budget))
        budget -= chunks[-1].stop - chunks[-1].start
    state.waits.cause = waits.STEP
    if len(state.queue):
        if not admit:
            state.waits.cause = waits.PAGES
        else:
            _admit(state, now, budget, limit, chunks, copies)
    state.prefilling = [request for request in state.prefilling if request.planned < request.target]
    return chunks, copies


def token_budget(state: SchedulerState) -> int:
    """Prefill tokens that fit beside the decode rows; always enough for progress."""
    total = state.config.chunked_prefill_size
    if total <= 0:
        return _UNLIMITED
    return max(total - len(state.decode), total // _MIN_SHARE, 1)


def _next_chunk(request: Request, budget: int) -> Chunk:
    start = request.planned
    stop = min(request.target, start + budget)
    request.planned = stop
    completes = stop == request.target
    return Chunk(request, request.row, start, stop, completes, completes and request.max_new_tokens > 0)


def _admit(
    state: SchedulerState, now: float, budget: int, limit: int, chunks: list[Chunk], copies: list[tuple[int, int]]
) -> None:
    uncached_limit = state.config.max_prefill_tokens or _UNLIMITED
    # Tokens of this batch count in full, even where only a part of them fits the step.
    uncached = sum(chunk.request.target - chunk.start for chunk in chunks)
    for request in state.queue.candidates(state.pages.match_length):
        if not state.table.num_free_rows:
            state.waits.cause = waits.ROWS
            return
        if budget <= 0 or len(chunks) >= limit:
            state.waits.cause = waits.PREFILL_BUDGET
            return
        prefix = state.pages.use_prefix(request)
        needed = len(request.tokens) - prefix.start
        cause = None
        if chunks and uncached + needed > uncached_limit:
            cause = waits.PREFILL_BUDGET
        elif _waits_for_prefix(state, request, prefix):
            cause = waits.SHARED_PREFIX
        elif not _take_pages(state, request, prefix, now):
            cause = waits.PAGES
        if cause is not None:
            state.waits.cause = cause
            state.pages.unlock(request)
            return
        if prefix.copy_source >= 0:
            own = state.table.page_table[request.row, len(prefix.pages)]
            copies.append((prefix.copy_source, int(own)))
        state.counters.prefill_batch_requests += 1
        chunks.append(_next_chunk(request, budget))
        budget -= chunks[-1].stop - chunks[-1].start
        uncached += needed


def _waits_for_prefix(state: SchedulerState, request: Request, prefix: PrefixUse) -> bool:
    """Whether another prefill is about to put most of this prompt into the cache.

    Those behind it in the queue wait as well: passing it would cost them their place in the order, and it nothing.
    """
    limited = request.scored < request.prompt_length
    return not limited and state.in_progress.is_worth_waiting(request, prefix.start)


def _take_pages(state: SchedulerState, request: Request, prefix: PrefixUse, now: float) -> bool:
    """Start the request with pages for its whole target, if they can be had and the running ones can still grow."""
    page_size = state.config.page_size
    count = -(-len(request.tokens) // page_size) - len(prefix.pages)
    headroom = state.table.num_live * -(-_HEADROOM_TOKENS // page_size)
    if state.pages.num_available < count + headroom or not state.pages.reserve(count):
        return False
    lifecycle.start(state, request, prefix, state.pages.pool.allocate(count), now)
    return True
