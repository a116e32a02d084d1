"""How far a decode step is from its floor: the model's matrix products at that batch size plus one read of the KV.

    python -m benchmarks.decode_floor [--model-path DIR] [--dtype float32|bfloat16] [--seconds 8]

The step is the model runner's, tensors made and tokens sampled; the floor is measured in the same process, in turns
with it, so that other load on the machine meets both. Both are given as the best and the median of all turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.report import add_json_argument, publish
from sglang_lite.adapters.base import KVGeometry, PackedLinear
from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.execution.model_runner import ModelRunner
from sglang_lite.models.registry import load_model
from sglang_lite.models.repository import resolve_model_path
from sglang_lite.scheduler.plan import FROM_DEVICE, SamplingColumns, StepPlan
from sglang_lite.types import NO_SEED

PAGE_SIZE = 16
HEADERS = (
    "rows",
    "context",
    "shared",
    "products ms",
    "KV MB",
    "KV read ms",
    "floor ms",
    "step ms",
    "ratio",
    "ratio of medians",
)


@dataclass(frozen=True, slots=True)
class Case:
    """Rows that decode together: tokens of each, and how many of them are the same pages for all."""

    rows: int
    context: int
    shared: int = 0


CASES = (Case(1, 300), Case(16, 300), Case(64, 300), Case(16, 1080, 1024))


class RecordingOperations(CpuOperations):
    """Remembers the linear layers, to time them alone."""

    def __init__(self, *, measure: bool = True, workspace_bytes: int = 0) -> None:
        super().__init__(measure=measure, workspace_bytes=workspace_bytes)
        self.linears: list[PackedLinear] = []

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, shared: bool = False) -> PackedLinear:
        """As ``CpuOperations``; remembered."""
        packed = super().pack_linear(weight, bias, shared=shared)
        self.linears.append(packed)
        return packed


def make_plan(case: Case, step: int, context: int) -> StepPlan:
    """Decode step of all rows at ``context`` tokens, pages scattered over the pool."""
    width = -(-context // PAGE_SIZE)
    shared_pages = case.shared // PAGE_SIZE
    reserved = -(-(case.context + 200) // PAGE_SIZE)
    scattered = np.random.default_rng(1).permutation(case.rows * reserved).astype(np.int32)
    table = scattered.reshape(case.rows, reserved)[:, :width].copy()
    table[:, :shared_pages] = table[0, :shared_pages]
    zeros = np.zeros(case.rows, dtype=np.float32)
    position = context - 1
    slots = table[:, position // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + position % PAGE_SIZE
    return StepPlan(
        step=step,
        num_decode=case.rows,
        rows=np.arange(case.rows, dtype=np.int32),
        query_lens=np.ones(case.rows, dtype=np.int32),
        input_ids=np.full(case.rows, FROM_DEVICE, dtype=np.int32),
        positions=np.full(case.rows, position, dtype=np.int32),
        slot_mapping=slots,
        kv_lens=np.full(case.rows, context, dtype=np.int32),
        page_table=table,
        sample_index=np.arange(case.rows, dtype=np.int32),
        sampling=SamplingColumns(
            temperature=zeros,
            top_p=zeros + 1,
            top_k=np.full(case.rows, -1, dtype=np.int32),
            min_p=zeros,
            frequency_penalty=zeros,
            presence_penalty=zeros,
            repetition_penalty=zeros + 1,
            seed=np.full(case.rows, NO_SEED, dtype=np.int64),
            all_greedy=True,
            penalized=np.empty(0, dtype=np.int32),
        ),
        generated=np.zeros(case.rows, dtype=np.int32),
        suppressed={},
        resumed={},
        page_copies=np.empty((0, 2), dtype=np.int32),
        logprobs=[],
    )


class Clock:
    """Milliseconds of a call.

    Args:
        processor_time: count the process's processor time instead of the time that passes.
    """

    def __init__(self, *, processor_time: bool) -> None:
        self._now = time.process_time if processor_time else time.perf_counter

    def milliseconds(self, function: Callable[[], object]) -> float:
        """Of one call."""
        started = self._now()
        function()
        return (self._now() - started) * 1e3


def read_kv(memory: Tensor, num_bytes: int) -> Callable[[], object]:
    """One pass over this many bytes, as fast as torch reads."""
    flat = memory.view(-1)[: num_bytes // memory.element_size()]
    return lambda: flat.sum()


def products(linears: Sequence[PackedLinear], rows: int, dtype: torch.dtype) -> Callable[[], None]:
    """One pass over all linear layers with this many rows."""
    inputs = {linear.in_features: torch.randn(rows, linear.in_features).to(dtype) for linear in linears}

    def run() -> None:
        for linear in linears:
            linear(inputs[linear.in_features])

    return run


@torch.inference_mode()
def measure(
    case: Case, runner: ModelRunner, linear_sets: Sequence[Sequence[PackedLinear]], seconds: float, clock: Clock
) -> list[object]:
    """Take turns between step and floor for some seconds; a row of the table."""
    geometry = runner.geometry
    unique_tokens = case.shared + case.rows * (case.context - case.shared)
    kv_bytes = unique_tokens * geometry.bytes_per_token
    read = read_kv(runner.pool, kv_bytes)
    passes = [products(linears, case.rows, geometry.dtype) for linears in linear_sets]
    context = case.context - 15
    runner.run(make_plan(case, 0, context))  # makes the copies of the sequences
    times: dict[str, list[float]] = {"step": [], "read": []} | {f"products{i}": [] for i in range(len(passes))}
    deadline = time.perf_counter() + seconds
    for step in range(1, 160):
        plan = make_plan(case, step, context + step)
        times["step"].append(clock.milliseconds(lambda plan=plan: runner.run(plan)))  # type: ignore[misc]
        times["read"].append(clock.milliseconds(read))
        for index, run in enumerate(passes):
            times[f"products{index}"].append(clock.milliseconds(run))
        if time.perf_counter() > deadline and step >= 5:
            break

    def floor(summary: Callable[[list[float]], float]) -> tuple[float, float]:
        return min(summary(times[f"products{i}"]) for i in range(len(passes))), summary(times["read"])

    best_products, best_read = floor(min)
    best_floor = best_products + best_read
    median_floor = sum(floor(statistics.median))
    best_step, median_step = min(times["step"]), statistics.median(times["step"])
    return [
        case.rows,
        case.context,
        case.shared,
        round(best_products, 1),
        round(kv_bytes / 1e6),
        round(best_read, 1),
        round(best_floor, 1),
        round(best_step, 1),
        round(best_step / best_floor, 2),
        round(median_step / median_floor, 2),
    ]


def main() -> None:
    """Load the model twice, in the layouts chosen by measuring and in torch's own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seconds", type=float, default=8.0, help="per case")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--processor-time", action="store_true", help="one thread, processor time: for a machine with other load"
    )
    parser.add_argument("--no-workspace", action="store_true", help="read the pool directly")
    add_json_argument(parser)
    arguments = parser.parse_args()
    if arguments.processor_time:
        arguments.threads = 1
    torch.set_num_threads(arguments.threads)
    clock = Clock(processor_time=arguments.processor_time)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[arguments.dtype]
    directory = model_directory(arguments.model_path)
    ops = RecordingOperations(workspace_bytes=0 if arguments.no_workspace else 4 << 30)
    model, description = load_model(directory, ops=ops, dtype=dtype)
    plain = RecordingOperations(measure=False)
    load_model(directory, ops=plain, dtype=dtype, progress=False)
    rows = []
    for case in CASES:
        num_pages = case.rows * -(-(case.context + 200) // PAGE_SIZE)
        geometry = KVGeometry(
            num_pages, PAGE_SIZE, description.num_layers, description.num_kv_heads, description.head_dim, dtype
        )
        runner = ModelRunner(model, ops, geometry, num_rows=case.rows)
        runner.pool.normal_()
        rows.append(measure(case, runner, (ops.linears, plain.linears), arguments.seconds, clock))
        print(*rows[-1], flush=True)
    settings = {
        "clock": "processor" if arguments.processor_time else "wall",
        "threads": arguments.threads,
        "dtype": arguments.dtype,
        "torch": torch.__version__,
    }
    publish("decode_floor", HEADERS, rows, json_path=arguments.json, extra=settings)


def model_directory(name_or_path: str) -> Path:
    """The directory of a model; ``demo`` is made when it is absent."""
    if name_or_path == "demo":
        from sglang_lite.demo_model import materialize_in_cache

        return materialize_in_cache(lambda done, total: None)
    return resolve_model_path(name_or_path)


if __name__ == "__main__":
    main()
