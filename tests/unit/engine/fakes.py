"""A scheduler and an executor small enough to see through, for tests of the loop around them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from sglang_lite.engine.frames import Command, ControlEvent
from sglang_lite.execution.base import ExecutionError
from sglang_lite.grammar.base import TokenMatcher
from sglang_lite.scheduler.plan import SamplingColumns, StepOutput, StepPlan
from sglang_lite.scheduler.stats import SchedulerStats
from sglang_lite.types import FinishCode, OutputColumns, RequestColumns


def rows(keys: Iterable[int], token: int = -1, finish: Iterable[int] = (), **more: Any) -> OutputColumns:
    key = np.array(list(keys), np.int64)
    codes = np.array(list(finish), np.uint8) if finish else np.zeros(len(key), np.uint8)
    return OutputColumns(
        key=key,
        token=np.full(len(key), token, np.int32),
        finish=codes,
        matched=np.full(len(key), -1, np.int32),
        cached_tokens=np.zeros(len(key), np.int32),
        retractions=np.zeros(len(key), np.uint8),
        **more,
    )


def requests(keys: Iterable[int], max_new_tokens: int = 3, tokens: int = 1) -> RequestColumns:
    key = np.array(list(keys), np.int64)
    n = len(key)

    def column(value: float, dtype: Any) -> Any:
        return np.full(n, value, dtype)

    return RequestColumns(
        key=key,
        num_tokens=column(tokens, np.int32),
        max_new_tokens=column(max_new_tokens, np.int32),
        min_new_tokens=column(0, np.int32),
        temperature=column(0, np.float32),
        top_p=column(1, np.float32),
        top_k=column(-1, np.int32),
        min_p=column(0, np.float32),
        frequency_penalty=column(0, np.float32),
        presence_penalty=column(0, np.float32),
        repetition_penalty=column(1, np.float32),
        seed=column(-1, np.int64),
        priority=column(0, np.int64),
        flags=column(0, np.uint32),
        logprob_start=column(-1, np.int32),
        top_logprobs=column(0, np.int32),
        timeout=column(0, np.float32),
        token_ids=np.zeros(n * tokens, np.int32),
    )


def empty_plan(step: int, num_rows: int) -> StepPlan:
    none = np.zeros(0, np.int32)
    floats = np.zeros(num_rows, np.float32)
    sampling = SamplingColumns(
        temperature=floats,
        top_p=floats,
        top_k=np.zeros(num_rows, np.int32),
        min_p=floats,
        frequency_penalty=floats,
        presence_penalty=floats,
        repetition_penalty=floats,
        seed=np.zeros(num_rows, np.int64),
        all_greedy=True,
        penalized=none,
    )
    return StepPlan(
        step=step,
        num_decode=num_rows,
        rows=np.arange(num_rows, dtype=np.int32),
        query_lens=np.ones(num_rows, np.int32),
        input_ids=np.zeros(num_rows, np.int32),
        positions=np.zeros(num_rows, np.int32),
        slot_mapping=np.zeros(num_rows, np.int64),
        kv_lens=np.ones(num_rows, np.int32),
        page_table=np.zeros((num_rows, 1), np.int32),
        sample_index=np.arange(num_rows, dtype=np.int32),
        sampling=sampling,
        generated=np.zeros(num_rows, np.int32),
        suppressed={},
        resumed={},
        page_copies=np.zeros((0, 2), np.int32),
        logprobs=[],
    )


class CountingScheduler:
    """Every live request gets a token in every step until its limit; the newest plans are not known to be last."""

    config = SimpleNamespace(max_running_requests=8)

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.plans: deque[list[int]] = deque()
        self.steps = 0
        self.pending: list[OutputColumns] = []
        self.log: list[str] = []
        self.deadline: float | None = None
        self.reclaimable = 0
        self.paused = False
        self.flushed = 0
        self.broken = False

    def admit(self, columns: RequestColumns, now: float, matchers: Mapping[int, TokenMatcher]) -> None:
        if self.broken:
            raise RuntimeError("the scheduler is broken")
        self.log.append("admit")
        self.live.update(zip(columns.key.tolist(), columns.max_new_tokens.tolist(), strict=True))

    def abort(self, keys: Any, now: float) -> int:
        found = [key for key in np.asarray(keys).tolist() if self.live.pop(key, None) is not None]
        self.pending.append(rows(found, finish=[FinishCode.ABORTED] * len(found)))
        return len(found)

    def abort_all(self, now: float) -> int:
        return self.abort(list(self.live), now)

    def finish(self, keys: Any, now: float) -> None:
        for key in np.asarray(keys).tolist():
            self.live.pop(key, None)

    def plan(self, now: float) -> StepPlan | None:
        if self.paused or not self.live or (self.deadline is not None and now < self.deadline):
            return None
        self.log.append(f"plan {self.steps}")
        self.plans.append(list(self.live))
        self.steps += 1
        return empty_plan(self.steps - 1, len(self.live))

    def commit(self, output: StepOutput, now: float) -> OutputColumns:
        self.log.append(f"commit {output.step}")
        keys = [key for key in self.plans.popleft() if key in self.live]
        codes = []
        for key in keys:
            self.live[key] -= 1
            codes.append(FinishCode.LENGTH if self.live[key] == 0 else FinishCode.RUNNING)
            if self.live[key] == 0:
                del self.live[key]
        return rows(keys, token=5, finish=codes)

    def fail(self, step: int, message: str, now: float) -> OutputColumns:
        keys = [key for key in self.plans.popleft() if self.live.pop(key, None) is not None]
        return rows(keys, finish=[FinishCode.ERROR] * len(keys), messages=dict.fromkeys(keys, message))

    def drain_outputs(self) -> OutputColumns:
        drained, self.pending = self.pending, []
        if not drained:
            return rows([])
        keys = [key for part in drained for key in part.key.tolist()]
        return rows(keys, finish=[FinishCode.ABORTED] * len(keys)) if keys else rows([])

    def maintain(self, max_pages: int) -> int:
        freed = min(self.reclaimable, max_pages)
        self.reclaimable -= freed
        return freed

    def flush(self) -> bool:
        if self.live or self.plans:
            return False
        self.flushed += 1
        return True

    def pause(self, mode: str, now: float) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def next_deadline(self) -> float | None:
        return self.deadline

    @property
    def has_work(self) -> bool:
        return bool(self.live and not self.paused) or bool(self.plans)

    def stats(self) -> Any:
        counts = dict.fromkeys(SchedulerStats.__struct_fields__, 0)
        counts |= {"num_running": len(self.live), "generated_tokens": self.steps, "finished_requests": {}}
        return SchedulerStats(**{**counts, "paused": "in_place" if self.paused else ""})


class ScriptedExecutor:
    """Remembers the order of calls; fails the steps it is told to."""

    def __init__(self, log: list[str], failing: Iterable[int] = ()) -> None:
        self.log = log
        self.failing = set(failing)
        self.queue: deque[StepPlan] = deque()
        self.most_in_flight = 0

    def submit(self, plan: StepPlan) -> None:
        self.queue.append(plan)
        self.most_in_flight = max(self.most_in_flight, len(self.queue))

    def collect(self) -> StepOutput:
        plan = self.queue.popleft()
        self.log.append(f"collect {plan.step}")
        if plan.step in self.failing:
            raise ExecutionError(f"step {plan.step} ran out of luck")
        return StepOutput(plan.step, np.full(len(plan.rows), 5, np.int32), [])

    @property
    def in_flight(self) -> int:
        return len(self.queue)

    def close(self) -> None:
        self.queue.clear()


class ScriptedTransport:
    """Hands out one prepared batch of commands a turn and records what is sent and how long the core would wait."""

    def __init__(self, *batches: list[Command]) -> None:
        self.batches = deque(batches)
        self.outputs: list[OutputColumns] = []
        self.events: list[ControlEvent] = []
        self.waits: list[float | None] = []

    def receive(self, timeout: float | None) -> list[Command]:
        self.waits.append(timeout)
        return self.batches.popleft() if self.batches else []

    def send_output(self, columns: OutputColumns) -> None:
        self.outputs.append(columns)

    def send(self, event: ControlEvent, front: int | None = None) -> None:
        self.events.append(event)
