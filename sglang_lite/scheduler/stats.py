"""Counters of the scheduler and the snapshot that metrics and load reports are made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from sglang_lite.types import FinishCode


@dataclass(slots=True)
class Counters:
    """Running totals since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0
    retracted_input_tokens: int = 0
    retracted_output_tokens: int = 0
    prefill_batches: int = 0
    prefill_batch_requests: int = 0
    decode_steps: int = 0
    steps: int = 0
    failed_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verified_rows: int = 0
    finished: list[int] = field(default_factory=lambda: [0] * len(FinishCode))


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. Requests and pages are as of now, everything after ``page_size`` counts since the start.

    Attributes:
        num_prefilling: running requests whose prompt is not computed yet; included in ``num_running``.
        num_lent: requests that are over here while a peer may still read or write their pages.
        num_pending: waiting requests that were preempted; included in ``num_waiting``.
        num_waiting_tokens: known tokens of the waiting requests.
        num_in_flight: uncommitted plans.
        free_pages, cached_pages, held_pages: owners of the pool's pages; they add up to ``num_pages``.
        evictable_pages: cached pages that no running request reads.
        prompt_tokens, cached_tokens: of requests that have started, and how many of them the cache had.
        computed_prompt_tokens: positions computed by prefill chunks, repeated work after preemptions included.
        generated_tokens: output tokens committed.
        retractions: preemptions, with the prompt and output tokens of the preempted requests.
        evicted_tokens: cached tokens given up.
        prefill_batches, prefill_batch_requests: plans with prefill chunks, and how many requests started in them.
        decode_steps, steps, failed_steps: plans with decode rows, all plans, plans that the executor failed.
        drafted_tokens, accepted_tokens, verified_rows: tokens guessed, how many of them were right, and how often a
            row verified guesses.
        finished_requests: ended requests by ``FinishCode`` name in lower case.
        paused: mode of the pause, "" while running.
    """

    num_running: int
    num_prefilling: int
    num_waiting: int
    num_lent: int
    num_pending: int
    num_waiting_tokens: int
    num_in_flight: int
    free_pages: int
    cached_pages: int
    held_pages: int
    evictable_pages: int
    num_pages: int
    page_size: int
    prompt_tokens: int
    cached_tokens: int
    computed_prompt_tokens: int
    generated_tokens: int
    retractions: int
    retracted_input_tokens: int
    retracted_output_tokens: int
    evicted_tokens: int
    prefill_batches: int
    prefill_batch_requests: int
    decode_steps: int
    steps: int
    failed_steps: int
    drafted_tokens: int
    accepted_tokens: int
    verified_rows: int
    finished_requests: dict[str, int]
    paused: str = ""
