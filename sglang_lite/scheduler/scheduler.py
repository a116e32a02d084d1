"""Scheduler: the facade that the engine core, the tests and the simulator drive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sglang_lite.cache.events import KVEvent
from sglang_lite.scheduler import admission, commit, handover, lifecycle, waits
from sglang_lite.scheduler.config import PauseMode, SchedulerConfig
from sglang_lite.scheduler.outputs import concatenate_outputs
from sglang_lite.scheduler.plan import StepOutput, StepPlan
from sglang_lite.scheduler.planner import Planner
from sglang_lite.scheduler.request import Request, RequestState
from sglang_lite.scheduler.state import SchedulerState
from sglang_lite.scheduler.stats import SchedulerStats
from sglang_lite.scheduler.transfers import WrittenPages
from sglang_lite.types import FinishCode, Int32Array, Int64Array, LogprobRecord, OutputColumns, RequestColumns

if TYPE_CHECKING:
    from sglang_lite.grammar.base import TokenMatcher

_NO_MATCHERS: Mapping[int, TokenMatcher] = {}


class Scheduler:
    """Continuous batching over a request table, a page pool and a prefix cache.

    A functional core: time is an argument (``now``, seconds on any monotonic clock), tokens are arguments, and the
    same calls always lead to the same plans. Per step the engine calls ``plan``, hands the plan to the executor,
    and ``commit``s its result; with ``config.overlap`` the next plan may be made before that.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._state = SchedulerState.create(config)
        self._planner = Planner(self._state)
        self._retract_when_idle = False

    def admit(self, columns: RequestColumns, now: float, matchers: Mapping[int, TokenMatcher] = _NO_MATCHERS) -> None:
        """Take new requests into the waiting queue. Rejections come out of ``drain_outputs``.

        Args:
            matchers: index of a request with a grammar -> its matcher, which the plans hand on to the executor.
        """
        self._state.now = now
        admission.admit(self._state, columns, now, matchers)
        self._state.held_until = None

    def abort(self, keys: Iterable[int] | Int64Array, now: float) -> int:
        """End requests at once, wherever they stand; no token of them is sent after this call.

        Returns:
            How many of the keys were live.
        """
        self._state.now = now
        requests = self._live(keys)
        for request in requests:
            self._end(request, FinishCode.ABORTED)
        return len(requests)

    def abort_all(self, now: float) -> int:
        """Abort every live request; returns how many."""
        return self.abort(list(self._state.requests), now)

    def finish(self, keys: Iterable[int] | Int64Array, now: float) -> None:
        """End requests that the front found complete (a stop string). Their pages are published; nothing is sent."""
        self._state.now = now
        for request in self._live(keys):
            lifecycle.end(self._state, request, FinishCode.STOP_TOKEN, keep=True)
            self._state.timelines.pop(request.key, None)

    def reject(self, keys: Iterable[int], message: str) -> None:
        """End requests that cannot be served with ``ERROR``."""
        for request in self._live(keys):
            lifecycle.end(self._state, request, FinishCode.ERROR, keep=False)
            self._state.outbox.add(request, FinishCode.ERROR, message)

    def plan(self, now: float) -> StepPlan | None:
        """Plan the next step, or None when there is nothing to run, or not before a commit, a time or a resume."""
        state = self._state
        state.now = now
        for request, code in state.deadlines.expired(now):
            self._end(request, code)
        state.waits.advance(now)
        if state.paused is not None:
            state.waits.cause = waits.PAUSE
            return None
        if len(state.in_flight) >= self.config.max_in_flight:
            return None
        if self._gathering(now):
            state.waits.cause = waits.BATCHING
            return None
        return self._planner.plan(now)

    def commit(self, output: StepOutput, now: float) -> OutputColumns:
        """Apply the result of the oldest uncommitted plan and return what has to be sent.

        Raises:
            ValueError: ``output`` belongs to another plan.
        """
        self._state.now = now
        columns = commit.commit(self._state, output)
        self._after_commit()
        return self._with_timelines(columns)

    def fail(self, step: int, message: str, now: float) -> OutputColumns:
        """The executor failed for the oldest uncommitted plan: its requests end with ``ERROR``, the others go on."""
        self._state.now = now
        columns = commit.fail(self._state, step, message)
        self._after_commit()
        return self._with_timelines(columns)

    def drain_outputs(self) -> OutputColumns:
        """Ends that no commit reports: aborts, time-outs, rejections."""
        columns, joined = self._state.outbox.drain(), self._state.transfers.drain()
        return self._with_timelines(columns if joined is None else concatenate_outputs(joined, columns))

    def drain_kv_events(self) -> list[KVEvent]:
        """What entered and left the prefix cache since the last call, oldest first; with ``config.kv_events``."""
        events = self._state.pages.events
        return [] if events is None else events.drain()

    def maintain(self, max_pages: int) -> int:
        """Reclaim up to ``max_pages`` cached pages if the pool runs low, off the critical path.

        Returns:
            Pages reclaimed; 0 when there is nothing to do.
        """
        pages = self._state.pages
        wanted = int(self.config.num_pages * self.config.free_page_watermark) - pages.pool.num_free
        return pages.evict(min(wanted, max_pages)) if wanted > 0 and max_pages > 0 else 0

    def flush(self) -> bool:
        """Empty the prefix cache; False, and nothing done, unless no request is live and no plan uncommitted.

        Requests that a pause has retracted own no pages and are in nobody's way: they compute everything again.
        """
        state = self._state
        in_the_way = state.table.num_live if state.paused == "retract" else len(state.requests)
        in_the_way += len(state.pages.holds) + len(state.transfers)
        if in_the_way or state.in_flight:
            return False
        state.pages.cache.flush()
        return True

    def pause(self, mode: PauseMode, now: float) -> None:
        """Stop planning. "abort" ends all requests, "retract" takes the pages of the running ones, "in_place" keeps.

        Steps in flight are still committed; a retraction waits for them.
        """
        self._state.now = now
        self._state.paused = mode
        if mode == "abort":
            self.abort_all(now)
        self._retract_when_idle = mode == "retract"
        self._after_commit()

    def resume(self) -> None:
        """Plan again after a pause."""
        self._state.paused = None
        self._retract_when_idle = False

    @property
    def is_paused(self) -> bool:
        """Between ``pause`` and ``resume``."""
        return self._state.paused is not None

    def next_deadline(self) -> float | None:
        """Time at which ``plan`` has something to do though nothing else happens: a time limit or the end of a wait."""
        held_until = self._state.held_until if self._state.paused is None else None
        times = [time for time in (self._state.deadlines.next(), held_until) if time is not None]
        return min(times, default=None)

    @property
    def has_work(self) -> bool:
        """Whether a plan is uncommitted, or ``plan`` would make one before ``next_deadline``."""
        state = self._state
        if state.in_flight:
            return True
        waiting_here = len(state.requests) > len(state.transfers.held)
        return waiting_here and state.paused is None and state.held_until is None

    @property
    def max_request_tokens(self) -> int:
        """Most tokens, prompt and output together, that one request can have here."""
        return self.config.max_sequence_tokens

    def stats(self) -> SchedulerStats:
        """A snapshot for metrics and load reports."""
        state = self._state
        counters, pages = state.counters, state.pages
        waiting = state.queue.requests()
        return SchedulerStats(
            num_running=state.table.num_live,
            num_prefilling=int(np.count_nonzero(state.table.state[state.table.live] == RequestState.PREFILL)),
            num_waiting=len(waiting) + len(state.transfers),
            num_lent=len(state.pages.holds),
            num_pending=sum(request.state == RequestState.PENDING for request in waiting),
            num_waiting_tokens=state.queue.num_tokens + state.transfers.num_tokens,
            num_in_flight=len(state.in_flight),
            free_pages=pages.pool.num_free,
            cached_pages=pages.cache.num_cached_pages,
            held_pages=pages.pool.num_held,
            evictable_pages=pages.cache.num_evictable_pages,
            num_pages=self.config.num_pages,
            page_size=self.config.page_size,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            computed_prompt_tokens=counters.computed_prompt_tokens,
            generated_tokens=counters.generated_tokens,
            retractions=counters.retractions,
            retracted_input_tokens=counters.retracted_input_tokens,
            retracted_output_tokens=counters.retracted_output_tokens,
            evicted_tokens=pages.evicted_pages * self.config.page_size,
            prefill_batches=counters.prefill_batches,
            prefill_batch_requests=counters.prefill_batch_requests,
            decode_steps=counters.decode_steps,
            steps=counters.steps,
            failed_steps=counters.failed_steps,
            drafted_tokens=counters.drafted_tokens,
            accepted_tokens=counters.accepted_tokens,
            verified_rows=counters.verified_rows,
            finished_requests={code.name.lower(): counters.finished[code] for code in FinishCode if code},
            paused=state.paused or "",
        )

    def held(self) -> list[int]:
        """Keys of requests that wait for their peer, the oldest first (``RequestExtras.transfer``)."""
        return list(self._state.transfers.held)

    def prompt_length(self, key: int) -> int:
        """Prompt tokens of a live request."""
        return self._state.requests[key].prompt_length

    def release_held(self, key: int, *, lent: bool) -> bool:
        """See ``handover.release_held``."""
        return handover.release_held(self._state, key, lent=lent)

    def without_pages(self) -> list[int]:
        """See ``handover.without_pages``."""
        return handover.without_pages(self._state)

    def reserve_incoming(self, key: int) -> Int32Array | None:
        """See ``handover.reserve_incoming``."""
        return handover.reserve_incoming(self._state, key)

    @property
    def stale_step(self) -> int:
        """Number of the newest plan that may still write pages which are reserved now; -1 for none.

        Plans run in order: what one leaves in pages is gone when a later one has filled them. A peer waits for none.
        """
        return self._state.stale_step

    def has_run(self, step: int) -> bool:
        """Whether the plan of that number is committed."""
        in_flight = self._state.in_flight
        return not in_flight or in_flight[0].plan.step > step

    def join(self, key: int, token: int, code: FinishCode, matched: int, cached_tokens: int,
             logprobs: Sequence[LogprobRecord], now: float) -> bool:  # fmt: skip
        """See ``handover.join``. What it reports comes out of ``drain_outputs``."""
        self._state.now = now
        return handover.join(self._state, key, token, code, matched, cached_tokens, logprobs)

    def fail_request(self, key: int, code: FinishCode, message: str, now: float) -> bool:
        """End a request because its transfer failed; whether it was live."""
        self._state.now = now
        requests = self._live([key])
        for request in requests:
            lifecycle.end(self._state, request, code, keep=False)
            self._state.outbox.add(request, code, message)
        return bool(requests)

    def take_written(self) -> list[WrittenPages]:
        """Pages of prompts with a peer that committed plans completed since the last call."""
        return self._state.transfers.take_written()

    def take_ended(self) -> list[int]:
        """Keys of requests with a peer that ended since the last call, however they did."""
        return self._state.transfers.take_ended()

    def release_hold(self, key: int) -> bool:
        """The peer of a request that ended has no part in its pages any more; whether any were held."""
        return self._state.pages.holds.release(key)

    def audit(self) -> None:
        """Check the ownership of every page and every lock; for tests and debugging.

        Raises:
            AuditError: naming what disagrees.
        """
        self._state.pages.audit(self._state.transfers.incoming())

    def _live(self, keys: Iterable[int] | Int64Array) -> list[Request]:
        found = [self._state.requests.get(int(key)) for key in keys]
        return list(dict.fromkeys(request for request in found if request is not None))

    def _end(self, request: Request, code: FinishCode) -> None:
        lifecycle.end(self._state, request, code, keep=False)
        self._state.outbox.add(request, code)

    def _with_timelines(self, columns: OutputColumns) -> OutputColumns:
        if self._state.timelines:
            columns.timelines, self._state.timelines = self._state.timelines, {}
        return columns

    def _after_commit(self) -> None:
        if self._retract_when_idle and not self._state.in_flight:
            self._retract_when_idle = False
            for request in self._state.table.running():
                lifecycle.preempt(self._state, request)

    def _gathering(self, now: float) -> bool:
        """Whether an idle scheduler still waits for more requests to start together."""
        state = self._state
        state.held_until = None
        if self.config.max_wait_ms <= 0 or state.table.num_live or state.in_flight:
            return False
        oldest = state.queue.oldest()
        full = self.config.prefill_max_requests or self.config.max_running_requests
        if oldest is None or oldest.state != RequestState.NEW or len(state.queue) >= full:
            return False
        until = oldest.arrival + self.config.max_wait_ms / 1000
        if now >= until:
            return False
        state.held_until = until
        return True
