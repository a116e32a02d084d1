"""Admission: columns of new requests into the waiting queue, or a rejection that says why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from sglang_lite.scheduler import handover, lifecycle
from sglang_lite.scheduler.fair_queue import FairQueue
from sglang_lite.scheduler.request import Request, parameters_from_columns, special_bits
from sglang_lite.scheduler.state import SchedulerState
from sglang_lite.types import EMPTY_EXTRAS, FinishCode, RequestColumns

if TYPE_CHECKING:
    from sglang_lite.grammar.base import TokenMatcher

QUEUE_FULL_MESSAGE = "The request queue is full."


def admit(state: SchedulerState, columns: RequestColumns, now: float, matchers: Mapping[int, TokenMatcher]) -> None:
    """Queue N requests; the ones that cannot be taken are reported through the outbox.

    Args:
        matchers: index of a request with a grammar -> its matcher.
    """
    params = parameters_from_columns(columns)
    special = special_bits(columns).tolist()
    keys, limits = columns.key.tolist(), columns.max_new_tokens.tolist()
    ends = np.cumsum(columns.num_tokens).tolist()
    start = 0
    state.waits.advance(now)
    reading = state.waits.reading()
    for index, end in enumerate(ends):
        tokens = columns.token_ids[start:end]
        start = end
        key = keys[index]
        extras = columns.extras.get(index, EMPTY_EXTRAS)
        tenants = state.queue.tenants
        tenant = 0 if tenants is None else tenants.slot(extras.tenant, extras.tenant_weight)
        rejection = _rejection(state, key, len(tokens), limits[index], tenant)
        if rejection is not None:
            state.outbox.add_rejected(key, *rejection)
            state.counters.finished[rejection[0]] += 1
            continue
        room = state.config.max_sequence_tokens - len(tokens) + extras.num_resumed
        if limits[index] > room:
            # Never plan beyond the context length or the pool: such a request ends with LENGTH there.
            params["max_new_tokens"][index] = room
        state.next_order += 1
        request = Request(
            params[index], special[index], tokens, state.next_order, now, extras, matchers.get(index), reading
        )
        request.tenant = tenant
        request.embeds = columns.embeds.get(index)
        request.admitted_before = state.queue.num_admitted
        state.requests[key] = request
        if request.has_peer:
            handover.hold(state, request)
        else:
            state.queue.push(request)
        _set_deadlines(state, request, now)


def _rejection(
    state: SchedulerState, key: int, num_tokens: int, max_new_tokens: int, tenant: int
) -> tuple[FinishCode, str] | None:
    config = state.config
    if key in state.requests:
        return FinishCode.ERROR, f"request key {key} is in use by a request that has not ended"
    if num_tokens < 1:
        return FinishCode.ERROR, "the prompt has no tokens; at least one is needed"
    needed = num_tokens + (1 if max_new_tokens > 0 else 0)
    if needed > config.context_length:
        return FinishCode.TOO_LONG, (
            f"the prompt has {num_tokens} tokens and leaves no room for output in the context length of "
            f"{config.context_length} tokens; shorten the prompt"
        )
    if num_tokens > config.num_pages * config.page_size:
        return FinishCode.TOO_LONG, (
            f"the prompt has {num_tokens} tokens, but the KV pool holds {config.num_pages * config.page_size} "
            f"({config.num_pages} pages of {config.page_size}); shorten the prompt or raise --max-total-tokens"
        )
    if config.max_queued_requests is not None:
        # Requests that free rows are about to take do not count as queued.
        capacity = config.max_queued_requests + config.max_running_requests - state.table.num_live
        if len(state.queue) + len(state.transfers) >= capacity and not _crowd_out(state, tenant):
            return FinishCode.QUEUE_FULL, QUEUE_FULL_MESSAGE
    return None


def _crowd_out(state: SchedulerState, tenant: int) -> bool:
    """Make room in a full queue: the tenant that fills it beyond its share loses its newest request."""
    if not isinstance(state.queue, FairQueue) or not state.queue.tenants.crowds_out(tenant):
        return False
    request = state.queue.newest_of_heaviest()
    if request is None:
        return False
    lifecycle.end(state, request, FinishCode.QUEUE_FULL, keep=False)
    state.outbox.add(request, FinishCode.QUEUE_FULL, QUEUE_FULL_MESSAGE)
    return True


def _set_deadlines(state: SchedulerState, request: Request, now: float) -> None:
    if state.config.waiting_timeout > 0:
        state.deadlines.add_waiting(request, now + state.config.waiting_timeout)
    timeout = float(request.params["timeout"])
    if timeout > 0:
        state.deadlines.add_total(request, now + timeout)
    state.deadlines.prune(len(state.requests))
