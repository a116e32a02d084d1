"""What an engine core is made of, whoever builds it: the model's executor, or a null executor in tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, get_args

from sglang_lite.config import ServerConfig
from sglang_lite.configuration.kv_events import KVEventsConfig
from sglang_lite.disaggregation.pool_memory import PoolMemory
from sglang_lite.engine.grammars import GrammarLibrary
from sglang_lite.engine.info import EngineInfo
from sglang_lite.execution.base import Executor
from sglang_lite.scheduler.config import EvictionPolicy, Policy, SchedulerConfig
from sglang_lite.scheduler.scheduler import Scheduler
from sglang_lite.types import StartupError

if TYPE_CHECKING:
    from sglang_lite.disaggregation.ranked_sessions import RankChannel

CPU_CHUNK_TOKENS = 512
"""Prompt tokens of one step on a CPU: larger chunks are hardly faster there and hold up the running requests."""

DEVICE_CHUNK_TOKENS = 8192
"""Prompt tokens of one step on an accelerator."""

CPU_VERIFIED_TOKENS = 48
"""Tokens of a step that guesses are made up to, on a CPU (measured)."""

DEVICE_VERIFIED_TOKENS = 256
"""The same on an accelerator: about where reading 16-bit weights and multiplying with them take the same time."""

_Choice = TypeVar("_Choice")

Report = Callable[[str, float], None]
"""Takes (message, fraction in 0..1 or a negative number) while a core is built."""


@dataclass(slots=True, frozen=True)
class CoreParts:
    """A core ready to run.

    Attributes:
        depth: plans in flight at once.
        watch: takes a function, which is called with a sentence, in a thread of its own, when something outside this
            process that the executor needs is lost: the core may be idle then and would not notice.
        grammars: None when the core serves none.
        memory: the KV pool of rank 0 as transfers see it; None where it cannot be transferred.
        ranks: the way to the other tensor-parallel ranks; None without any.
    """

    scheduler: Scheduler
    executor: Executor
    info: EngineInfo
    depth: int
    watch: Callable[[Callable[[str], None]], None] = lambda on_loss: None
    grammars: GrammarLibrary | None = None
    memory: PoolMemory | None = None
    ranks: RankChannel | None = None


Build = Callable[[ServerConfig, Report], CoreParts]
"""Makes the parts of a core; raises ``StartupError`` for what cannot be served."""


def make_scheduler(config: ServerConfig, info: EngineInfo) -> Scheduler:
    """The scheduler for a pool and a model of that size, under the policies of the configuration.

    Raises:
        StartupError: a policy has no implementation.
    """
    policy = _chosen(config.schedule_policy, get_args(Policy), "--schedule-policy")
    eviction = _chosen(config.radix_eviction_policy, get_args(EvictionPolicy), "--radix-eviction-policy")
    kv_events = KVEventsConfig.parse(config.kv_events_config)
    return Scheduler(
        SchedulerConfig(
            num_pages=info.num_pages,
            page_size=info.page_size,
            context_length=info.context_length,
            max_running_requests=info.max_running_requests,
            max_queued_requests=config.max_queued_requests,
            chunked_prefill_size=chunk_tokens(config),
            max_prefill_tokens=config.max_prefill_tokens,
            prefill_max_requests=config.prefill_max_requests,
            policy=policy,
            low_priority_first=config.schedule_low_priority_values_first,
            eviction_policy=eviction,
            enable_radix_cache=_keeps_prefixes(config, info),
            # An id that the model has no logit for can be neither drawn nor suppressed.
            eos_token_ids=tuple(token for token in info.eos_token_ids if 0 <= token < info.vocab_size),
            max_wait_ms=config.max_wait_ms,
            waiting_timeout=config.request_waiting_timeout or 0.0,
            running_timeout=config.request_running_timeout or 0.0,
            overlap=not config.disable_overlap_schedule,
            draft_tokens=config.guessed_tokens,
            executor_drafts=config.drafts_with_weights,
            verified_tokens=CPU_VERIFIED_TOKENS if config.device == "cpu" else DEVICE_VERIFIED_TOKENS,
            fair=config.fair_scheduling,
            kv_events=None if kv_events is None else kv_events.format,
        )
    )


def _keeps_prefixes(config: ServerConfig, info: EngineInfo) -> bool:
    # Going on from cached pages would take the recurrent state behind them, which nothing keeps. A decode server gets
    # the pages of every prompt anew.
    return not config.disable_radix_cache and info.recurrent_state is None and config.disaggregation_mode != "decode"


def chunk_tokens(config: ServerConfig) -> int:
    """Prompt tokens of one step; -1 when prompts are not cut."""
    if config.chunked_prefill_size is not None:
        return config.chunked_prefill_size
    return CPU_CHUNK_TOKENS if config.device == "cpu" else DEVICE_CHUNK_TOKENS


def _chosen(value: str, choices: tuple[_Choice, ...], flag: str) -> _Choice:
    for choice in choices:
        if choice == value:
            return choice
    raise StartupError(f"{flag} {value}: allowed are {', '.join(map(str, choices))}")
