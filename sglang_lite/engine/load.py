"""Load of the core over time: when to report it, and rates since the report before."""

from __future__ import annotations

import time

from sglang_lite.engine.info import LoadSnapshot
from sglang_lite.scheduler.stats import SchedulerStats

REPORT_INTERVAL = 1.0
"""Seconds between two reports of a working core. An idle core reports once more and then stays silent."""


class LoadMeter:
    """Turns ``SchedulerStats`` into ``LoadSnapshot`` and says when the next report is due.

    Args:
        now: the core's clock, in seconds; every other ``now`` is of the same clock.
        max_running_requests: limit of the scheduler, for the snapshot.
    """

    def __init__(self, now: float, max_running_requests: int) -> None:
        self._max_running_requests = max_running_requests
        self._last = now
        self._dirty = False
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._throughput = 0.0
        self._hit_rate = 0.0
        self.steps = 0
        self.idle_seconds = 0.0

    def worked(self) -> None:
        """Something happened that changes the load."""
        self._dirty = True

    @property
    def next_due(self) -> float | None:
        """When the next report should be sent, None while there is nothing new to say."""
        return self._last + REPORT_INTERVAL if self._dirty else None

    def due(self, now: float) -> bool:
        """Whether that moment has come."""
        return self._dirty and now - self._last >= REPORT_INTERVAL

    def measure(self, stats: SchedulerStats, now: float) -> LoadSnapshot:
        """The load at ``now``. Rates cover the last whole interval, however often somebody asks in between."""
        if now - self._last >= REPORT_INTERVAL:
            self._update_rates(stats, now - self._last)
            self._last, self._dirty = now, False
        return LoadSnapshot(
            timestamp=time.time(),
            num_running=stats.num_running,
            num_prefilling=stats.num_prefilling,
            num_waiting=stats.num_waiting,
            num_retracted=stats.num_pending,
            waiting_tokens=stats.num_waiting_tokens,
            num_pages=stats.num_pages,
            page_size=stats.page_size,
            free_pages=stats.free_pages,
            cached_pages=stats.cached_pages,
            evictable_pages=stats.evictable_pages,
            held_pages=stats.held_pages,
            max_running_requests=self._max_running_requests,
            paused=bool(stats.paused),
            generation_throughput=self._throughput,
            cache_hit_rate=self._hit_rate,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            computed_prompt_tokens=stats.computed_prompt_tokens,
            generated_tokens=stats.generated_tokens,
            retractions=stats.retractions,
            retracted_input_tokens=stats.retracted_input_tokens,
            retracted_output_tokens=stats.retracted_output_tokens,
            evicted_tokens=stats.evicted_tokens,
            prefill_batches=stats.prefill_batches,
            prefill_batch_requests=stats.prefill_batch_requests,
            aborted_requests=stats.finished_requests.get("aborted", 0),
            failed_steps=stats.failed_steps,
            drafted_tokens=stats.drafted_tokens,
            accepted_tokens=stats.accepted_tokens,
            verified_rows=stats.verified_rows,
            steps=self.steps,
            idle_seconds=self.idle_seconds,
            cpu_seconds=time.process_time(),
        )

    def _update_rates(self, stats: SchedulerStats, elapsed: float) -> None:
        prompt = stats.prompt_tokens - self._prompt_tokens
        cached = stats.cached_tokens - self._cached_tokens
        self._throughput = (stats.generated_tokens - self._generated_tokens) / elapsed
        self._hit_rate = cached / prompt if prompt > 0 else 0.0
        self._prompt_tokens = stats.prompt_tokens
        self._cached_tokens = stats.cached_tokens
        self._generated_tokens = stats.generated_tokens
