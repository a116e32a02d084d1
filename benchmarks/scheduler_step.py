"""Time of the scheduler per decode step: plan, commit and egress frame, with an executor that costs nothing.

Run ``python -m benchmarks.scheduler_step``. Each row of the table is a number of running requests with contexts of
about 300 tokens on pages of 16. ``step`` is plan + commit + frame of one decode step; ``churn`` is the same where
every step a share of the requests ends and as many new ones are admitted. ``admit`` covers the decoded ingress
columns, the waiting queue, the prefill plans and their commits. The growth printed below the table is what Python
and NumPy hold more after ``--steps`` steps of churn than before.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from benchmarks.report import add_json_argument, publish, summarize
from sglang_lite.engine.frames import encode_output
from sglang_lite.scheduler import Scheduler, SchedulerConfig, StepPlan
from sglang_lite.types import FinishCode
from tests.support.null_executor import NullExecutor
from tests.support.scheduler_driver import request_columns

PAGE_SIZE = 16
PROMPT_TOKENS = 256
CONTEXT = 16384
END_TOKEN = 2
GROWTH_RUNNING = 256
MAINTENANCE_PAGES = 256

HEADERS = (
    "running",
    "step p50 us",
    "step p99 us",
    "plan p50 us",
    "commit p50 us",
    "frame p50 us",
    "churn p50 us",
    "churn p99 us",
    "admit req/s",
)


class Loop:
    """The engine loop around a null executor, one step ahead of the tokens, with a clock around each part."""

    def __init__(self, num_running: int, num_pages: int) -> None:
        self.num_running = num_running
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_pages=num_pages,
                page_size=PAGE_SIZE,
                context_length=CONTEXT,
                max_running_requests=num_running,
                chunked_prefill_size=65536,
                max_prefill_tokens=None,
                eos_token_ids=(END_TOKEN,),
            )
        )
        self.executor = NullExecutor(num_running)
        self.next_key = 0
        self.random = np.random.default_rng(0)
        self.durations: dict[str, list[int]] = {"plan": [], "commit": [], "frame": [], "step": []}

    def admit(self, count: int, max_new_tokens: int | list[int]) -> None:
        """Admit requests with prompts of their own."""
        keys = range(self.next_key, self.next_key + count)
        self.next_key += count
        prompts = self.random.integers(1000, 30000, (count, PROMPT_TOKENS), dtype=np.int32)
        columns = request_columns(keys, list(prompts), max_new_tokens=max_new_tokens)
        self.scheduler.admit(columns, 0.0)

    def fill(self, count: int) -> float:
        """Admit ``count`` endless requests and run until all decode; returns seconds without the executor."""
        limit = CONTEXT - PROMPT_TOKENS
        keys = range(self.next_key, self.next_key + count)
        self.next_key += count
        prompts = self.random.integers(1000, 30000, (count, PROMPT_TOKENS), dtype=np.int32)
        columns = request_columns(keys, list(prompts), max_new_tokens=limit)
        spent = _timed(lambda: self.scheduler.admit(columns, 0.0))
        while self.scheduler.stats().num_waiting or self.scheduler.stats().num_prefilling:
            start = time.perf_counter()
            plan = self.scheduler.plan(0.0)
            spent += time.perf_counter() - start
            if plan is not None:
                self.executor.submit(plan)
            if plan is None or self.executor.in_flight == 2:
                output = self.executor.collect()
                start = time.perf_counter()
                self.scheduler.commit(output, 0.0)
                spent += time.perf_counter() - start
        return spent

    def step(self) -> int:
        """One turn: plan the next step, then commit the one before and encode its frame. Returns requests ended."""
        clock = time.perf_counter_ns
        start = clock()
        plan: StepPlan | None = self.scheduler.plan(0.0)
        planned = clock()
        if plan is not None:
            self.executor.submit(plan)
        output = self.executor.collect()
        begin = clock()
        columns = self.scheduler.commit(output, 0.0)
        committed = clock()
        encode_output(columns)
        end = clock()
        self.durations["plan"].append(planned - start)
        self.durations["commit"].append(committed - begin)
        self.durations["frame"].append(end - committed)
        self.durations["step"].append(planned - start + end - begin)
        return int(np.count_nonzero(columns.finish != FinishCode.RUNNING))

    def turn_over(self, steps: int, *, keep: bool = False) -> None:
        """Steps that replace every request that ends; durations are dropped as they come unless ``keep``."""
        if not self.scheduler.has_work:
            self.admit(self.num_running, self.random.integers(2, 129, self.num_running).tolist())
        for _ in range(steps):
            ended = self.step()
            self.scheduler.maintain(MAINTENANCE_PAGES)
            if ended:
                self.admit(ended, self.random.integers(64, 193, ended).tolist())
            if not keep:
                self.reset()

    def reset(self) -> dict[str, list[int]]:
        """Take the durations collected so far."""
        taken = self.durations
        self.durations = {name: [] for name in taken}
        return taken


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _percentile(durations_ns: list[int], share: float) -> float:
    return round(float(np.percentile(durations_ns, share)) / 1e3, 1)


def measure_steady(num_running: int, steps: int) -> tuple[dict[str, list[int]], float]:
    """Durations of steady decode steps (ns), and admitted requests per second."""
    loop = Loop(num_running, num_running * ((PROMPT_TOKENS + steps + 64) // PAGE_SIZE + 1))
    admit_seconds = loop.fill(num_running)
    for _ in range(16):
        loop.step()
    loop.reset()
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        loop.step()
    gc.unfreeze()
    return loop.reset(), num_running / admit_seconds


def measure_growth(num_running: int, steps: int) -> float:
    """KiB that Python and NumPy hold more after ``steps`` steps, with requests ending, starting and being evicted."""
    # From the start, so that what replaces an older object does not look like growth. The pool is small enough to be
    # full of cached pages before the comparison begins.
    tracemalloc.start()
    loop = Loop(num_running, num_running * 40)
    loop.turn_over(600)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    loop.turn_over(steps)
    gc.collect()
    growth = (tracemalloc.get_traced_memory()[0] - before) / 1024
    tracemalloc.stop()
    return growth


def measure_churn(num_running: int, steps: int) -> list[int]:
    """Durations (ns) of steps where requests of about 128 output tokens end and are replaced."""
    loop = Loop(num_running, num_running * 64)
    loop.turn_over(96)
    loop.turn_over(steps, keep=True)
    return loop.durations["step"]


def main() -> None:
    """Measure, print one table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", default="256,1024,4096", help="comma-separated numbers of running requests")
    parser.add_argument("--measure-steps", type=int, default=400, help="steps timed for each row")
    parser.add_argument("--steps", type=int, default=10000, help="steps of the growth check, 0 for none")
    add_json_argument(parser)
    arguments = parser.parse_args()
    rows: list[list[object]] = []
    for num_running in (int(part) for part in arguments.running.split(",")):
        durations, admitted = measure_steady(num_running, arguments.measure_steps)
        churn = measure_churn(num_running, arguments.measure_steps)
        rows.append(
            [
                num_running,
                summarize(durations["step"]).median_us,
                _percentile(durations["step"], 99),
                *(summarize(durations[part]).median_us for part in ("plan", "commit", "frame")),
                summarize(churn).median_us,
                _percentile(churn, 99),
                round(admitted),
            ]
        )
    growth = {"running": GROWTH_RUNNING, "steps": arguments.steps, "kib": 0.0}
    if arguments.steps:
        growth["kib"] = round(measure_growth(GROWTH_RUNNING, arguments.steps), 1)
    publish("scheduler_step", HEADERS, rows, json_path=arguments.json, extra={"growth": growth})
    print(f"allocation growth over {arguments.steps} steps at {GROWTH_RUNNING} running: {growth['kib']} KiB")


if __name__ == "__main__":
    main()
