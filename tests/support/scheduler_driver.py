"""Drives a scheduler with an executor the way the engine loop does, and collects what is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_lite.execution.base import Executor
from sglang_lite.scheduler import Scheduler, SchedulerConfig, StepPlan
from sglang_lite.types import NO_SEED, FinishCode, LogprobRecord, OutputColumns, RequestColumns, RequestExtras
from tests.support.null_executor import CheckingExecutor

_DEFAULTS: dict[str, tuple[float, type]] = {
    "max_new_tokens": (16, np.int32),
    "min_new_tokens": (0, np.int32),
    "temperature": (0.0, np.float32),
    "top_p": (1.0, np.float32),
    "top_k": (-1, np.int32),
    "min_p": (0.0, np.float32),
    "frequency_penalty": (0.0, np.float32),
    "presence_penalty": (0.0, np.float32),
    "repetition_penalty": (1.0, np.float32),
    "seed": (NO_SEED, np.int64),
    "priority": (0, np.int64),
    "flags": (0, np.uint32),
    "logprob_start": (-1, np.int32),
    "top_logprobs": (0, np.int32),
    "timeout": (0.0, np.float32),
}


def request_columns(
    keys: Sequence[int],
    prompts: Sequence[Sequence[int]],
    *,
    extras: dict[int, RequestExtras] | None = None,
    **values: Any,
) -> RequestColumns:
    """Columns of N requests; each further argument is one value for all or N values."""
    columns: dict[str, Any] = {
        name: np.full(len(keys), default, dtype=dtype) for name, (default, dtype) in _DEFAULTS.items()
    }
    for name, value in values.items():
        columns[name][:] = value
    tokens = [np.asarray(prompt, dtype=np.int32) for prompt in prompts]
    return RequestColumns(
        key=np.array(keys, dtype=np.int64),
        num_tokens=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
        token_ids=np.concatenate(tokens) if tokens else np.empty(0, dtype=np.int32),
        extras=extras or {},
        **columns,
    )


@dataclass(slots=True)
class Received:
    """What was sent for one request."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishCode = FinishCode.RUNNING
    matched: int = -1
    cached_tokens: int = 0
    retractions: int = 0
    message: str = ""
    logprobs: list[LogprobRecord] = field(default_factory=list)


class Driver:
    """A scheduler, an executor and everything that came out.

    Args:
        config: of the scheduler.
        executor: of tokens; None for a ``CheckingExecutor`` that fits the configuration.
        vocab_size: of that executor.
    """

    def __init__(self, config: SchedulerConfig, executor: Executor | None = None, vocab_size: int = 50) -> None:
        self.scheduler = Scheduler(config)
        self.executor = executor or CheckingExecutor(
            config.max_running_requests,
            num_slots=config.num_pages * config.page_size,
            page_size=config.page_size,
            vocab_size=vocab_size,
        )
        self.now = 0.0
        self.received: dict[int, Received] = {}
        self.plans: list[StepPlan] = []
        self.first_tokens: list[int] = []

    def admit(self, keys: Sequence[int], prompts: Sequence[Sequence[int]], **values: Any) -> None:
        """Admit requests, see ``request_columns``."""
        self.scheduler.admit(request_columns(keys, prompts, **values), self.now)
        self.drain()

    def plan(self) -> StepPlan | None:
        """Plan and submit one step."""
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.executor.submit(plan)
        self.drain()
        return plan

    def commit(self) -> OutputColumns:
        """Collect and commit the oldest step."""
        columns = self.scheduler.commit(self.executor.collect(), self.now)
        self.receive(columns)
        return columns

    def drain(self) -> OutputColumns:
        """Take what no commit reports."""
        columns = self.scheduler.drain_outputs()
        self.receive(columns)
        return columns

    def step(self) -> bool:
        """One turn of the engine loop: plan as far ahead as allowed, then commit one step. False when idle."""
        while self.plan() is not None:
            pass
        if not self.executor.in_flight:
            return False
        self.commit()
        return True

    def run(self, *, after_step: Callable[[], None] | None = None, limit: int = 10_000) -> None:
        """Step until idle."""
        for _ in range(limit):
            if not self.step():
                return
            if after_step is not None:
                after_step()
        raise AssertionError(f"not idle after {limit} steps")

    def receive(self, columns: OutputColumns) -> None:
        """Note what was sent, checking that nothing follows the end of a request."""
        for index, key in enumerate(columns.key.tolist()):
            received = self.received.setdefault(key, Received())
            assert received.finish == FinishCode.RUNNING, f"request {key} got a row after its end"
            token = int(columns.token[index])
            if token >= 0:
                if not received.tokens:
                    self.first_tokens.append(key)
                received.tokens.append(token)
            received.finish = FinishCode(int(columns.finish[index]))
            received.matched = int(columns.matched[index])
            received.cached_tokens = int(columns.cached_tokens[index])
            received.retractions = int(columns.retractions[index])
            received.message = columns.messages.get(key, "")
        for record in columns.logprobs:
            self.received.setdefault(record.key, Received()).logprobs.append(record)
