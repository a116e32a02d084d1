"""SchedulerConfig: the limits and policies that one scheduler works under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_lite.cache.namespace import EventFormat

Policy = Literal["fcfs", "lpm", "priority"]
EvictionPolicy = Literal["lru", "lfu", "fifo", "priority"]
PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies, fixed for the life of a scheduler.

    Attributes:
        num_pages: pages of the KV pool.
        page_size: tokens per page.
        context_length: most tokens of one sequence, prompt and output together.
        max_running_requests: rows of the request table, and of the executor's per-row state.
        max_queued_requests: requests that may wait beyond those that free rows will take; None for no limit.
        chunked_prefill_size: tokens of one step, shared by decode rows and prefill chunks; 0 or less means that
            prompts are never cut. Decode rows are never held back by it, and prefill always gets a share.
        max_prefill_tokens: uncached prompt tokens that may be in prefill together; the first request is always
            taken. None for no limit.
        prefill_max_requests: prefill chunks in one step; None for no limit.
        policy: order of the waiting queue. "fcfs": arrival; "lpm": longest cached prefix first; "priority": most
            urgent first, then arrival.
        low_priority_first: with "priority", smaller values are more urgent.
        starvation_limit: after so many later requests were admitted before it, a waiting request goes first.
        eviction_policy: order in which cached pages are given up.
        enable_radix_cache: keep the pages of finished requests for later prompts.
        eos_token_ids: the model's end tokens.
        max_wait_ms: how long an idle scheduler lets a batch gather before it starts; 0 starts at once.
        waiting_timeout: seconds a request may wait before it first runs; 0 for no limit.
        running_timeout: seconds from the first chunk to the end; 0 for no limit.
        overlap: plan one step ahead of the tokens (two uncommitted plans instead of one).
        draft_tokens: tokens guessed for a row and verified in one step, at most; 0 guesses nothing. Guesses are made
            of the tokens so far, so it needs ``overlap`` off.
        executor_drafts: the executor guesses (it has a draft model): plans reserve slots and leave the guesses open.
            Otherwise they are looked up in the request's own tokens.
        verified_tokens: tokens of all rows of a step that guesses are made up to. A step that reads its weights for
            few tokens takes some more for little; with this many it is bound by arithmetic, and a guess costs as much
            as the token that it may save.
        fair: whoever was served least goes first, between the tenants that requests name (see ``fairness``).
        kv_events: record what enters and leaves the prefix cache, with hashes of that format; None records nothing.
        reserved_decode_tokens: tokens that stay free for every running or reserved request when pages are reserved for
            a prompt that another server computes.
        free_page_watermark: share of the pool that ``maintain`` keeps free.
    """

    num_pages: int
    page_size: int
    context_length: int
    max_running_requests: int
    max_queued_requests: int | None = None
    chunked_prefill_size: int = 2048
    max_prefill_tokens: int | None = 16384
    prefill_max_requests: int | None = None
    policy: Policy = "fcfs"
    low_priority_first: bool = False
    starvation_limit: int = 256
    eviction_policy: EvictionPolicy = "lru"
    enable_radix_cache: bool = True
    eos_token_ids: tuple[int, ...] = ()
    max_wait_ms: float = 0.0
    waiting_timeout: float = 0.0
    running_timeout: float = 0.0
    overlap: bool = True
    draft_tokens: int = 0
    executor_drafts: bool = False
    verified_tokens: int = 48
    free_page_watermark: float = 0.03
    reserved_decode_tokens: int = 512
    fair: bool = False
    kv_events: EventFormat | None = None

    def __post_init__(self) -> None:
        sizes = (
            "num_pages",
            "page_size",
            "context_length",
            "max_running_requests",
            "starvation_limit",
            "verified_tokens",
        )
        for name in sizes:
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name in ("max_wait_ms", "waiting_timeout", "running_timeout"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more")
        if self.draft_tokens < 0 or (self.draft_tokens and self.overlap):
            raise ValueError(
                f"draft_tokens is {self.draft_tokens} with overlap {self.overlap}: it must be 0 or more, and guesses "
                f"need overlap off"
            )
        if self.policy not in ("fcfs", "lpm", "priority"):
            raise ValueError(f"policy is {self.policy!r}; allowed are fcfs, lpm and priority")
        if self.fair and self.policy == "lpm":
            raise ValueError("fair with the policy lpm: the cached prefix would decide against the shares")
        if not 0 <= self.free_page_watermark < 1:
            raise ValueError(f"free_page_watermark is {self.free_page_watermark}; allowed are 0 to below 1")

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens (prompt and output) of one request: the context length, or what the pool can hold.

        The last output token needs no slot, because nothing attends to it.
        """
        return min(self.context_length, self.num_pages * self.page_size + 1)

    @property
    def max_in_flight(self) -> int:
        """Plans that may be uncommitted at a time."""
        return 2 if self.overlap else 1
