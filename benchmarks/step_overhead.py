"""Host time of one decode step on an accelerator, the model's math left out.

Everything between a plan and its launched step runs as it does in a server: page metadata, one upload, planning of the
attention wrappers, the adapters' calls, sampling, the copy of the tokens. Kernels, products and the device are
stand-ins that return at once, so that what is timed is Python, NumPy and torch's dispatch. A real device adds
FlashInfer's own planning (C++) and the launches themselves.

    python -m benchmarks.step_overhead
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import add_json_argument, publish, summarize
from sglang_lite.adapters.base import KVGeometry
from sglang_lite.execution.device_runner import DeviceRunner
from sglang_lite.models.registry import load_model
from sglang_lite.scheduler.plan import FROM_DEVICE, SamplingColumns, StepPlan
from tests.support.kernel_doubles.null import NullDevice, NullOperations
from tests.support.step_plans import sampling_columns
from tests.support.tiny_checkpoints import TinyCase, save_checkpoint

HEADERS = ("rows", "context", "sampling", "forward", "launch us", "p90 us")
PAGE_SIZE = 16
TARGET_US = 1500.0
"""Most for a step of 256 rows."""

CAPTURED = "captured"
"""Forward passes that a server replays; the others are launched one adapter call after another."""

GREEDY, SAMPLED = "greedy", "top-k, top-p"


def checkpoint(directory: Path, layers: int) -> None:
    """A model as deep as a real one, and narrow: its math is replaced anyway."""
    save_checkpoint(
        TinyCase("Qwen3", {"num_hidden_layers": layers, "head_dim": 16, "num_attention_heads": 4}), directory
    )


def make_runner(directory: Path, num_rows: int, context: int, *, captured: bool) -> DeviceRunner:
    """A runner whose device, kernels and products do nothing."""
    ops = NullOperations(torch.device("cpu"))
    model, description = load_model(directory, ops=ops, dtype=torch.bfloat16, context_length=context, progress=False)
    geometry = KVGeometry(
        num_rows * -(-context // PAGE_SIZE), PAGE_SIZE, description.num_layers, 2, description.head_dim, torch.bfloat16
    )
    runner = DeviceRunner(
        model,
        ops,
        NullDevice(),
        geometry,
        num_rows=num_rows,
        context_length=context,
        batch_sizes=(num_rows,) if captured else (),
    )
    return runner


def columns_of(kind: str, num_rows: int) -> SamplingColumns:
    """Parameters of all rows."""
    if kind == GREEDY:
        return sampling_columns(num_rows)
    return sampling_columns(num_rows, temperature=0.8, top_k=40, top_p=0.95)


def decode_plans(num_rows: int, context: int, columns: SamplingColumns, count: int) -> list[StepPlan]:
    """Steps of rows whose lengths lie around half the context, pages scattered."""
    random = np.random.default_rng(0)
    width = -(-context // PAGE_SIZE)
    table = random.permutation(num_rows * width).astype(np.int32).reshape(num_rows, width)
    lengths = random.integers(context // 4, 3 * context // 4, num_rows).astype(np.int32)
    rows = np.arange(num_rows, dtype=np.int32)
    plans = []
    for step in range(count):
        kv_lens = lengths + np.int32(step % (context // 4) + 1)
        positions = kv_lens - np.int32(1)
        pages = -(-int(kv_lens.max()) // PAGE_SIZE)
        slots = table[rows, positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
        plans.append(
            StepPlan(
                step=step,
                num_decode=num_rows,
                rows=rows,
                query_lens=np.ones(num_rows, dtype=np.int32),
                input_ids=np.full(num_rows, FROM_DEVICE, dtype=np.int32),
                positions=positions,
                slot_mapping=slots,
                kv_lens=kv_lens,
                page_table=table[:, :pages],
                sample_index=rows,
                sampling=columns,
                generated=np.full(num_rows, step, dtype=np.int32),
                suppressed={},
                resumed={},
                page_copies=np.empty((0, 2), dtype=np.int32),
                logprobs=[],
            )
        )
    return plans


def measure(runner: DeviceRunner, plans: list[StepPlan]) -> list[int]:
    """Nanoseconds of each launch."""
    durations = []
    for plan in plans:
        started = time.perf_counter_ns()
        pending = runner.launch(plan)
        durations.append(time.perf_counter_ns() - started)
        pending.result()
    return durations


def main() -> None:
    """Measure, print one table, write JSON; exit 1 when a captured step of 256 rows is over the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,64,256", help="comma-separated batch sizes")
    parser.add_argument("--contexts", default="2048,8192", help="comma-separated context lengths")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model")
    parser.add_argument("--steps", type=int, default=200, help="steps timed for each row of the table")
    add_json_argument(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table: list[list[object]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        checkpoint(directory, arguments.layers)
        for num_rows in (int(part) for part in arguments.rows.split(",")):
            for context in (int(part) for part in arguments.contexts.split(",")):
                table += _measure_all(directory, num_rows, context, arguments.steps)
    publish("step_overhead", HEADERS, table, json_path=arguments.json, extra={"layers": arguments.layers})
    over = [row for row in table if row[0] == 256 and row[3] == CAPTURED and float(str(row[4])) > TARGET_US]
    print(f"target for captured steps of 256 rows: {TARGET_US:.0f} us; {'missed' if over else 'met'}")
    if over:
        raise SystemExit(1)


def _measure_all(directory: Path, num_rows: int, context: int, steps: int) -> list[list[object]]:
    rows: list[list[object]] = []
    for captured in (True, False):
        runner = make_runner(directory, num_rows, context, captured=captured)
        measure(runner, decode_plans(num_rows, context, columns_of(GREEDY, num_rows), 3))
        if captured:
            runner.capture()
        for kind in (GREEDY, SAMPLED):
            plans = decode_plans(num_rows, context, columns_of(kind, num_rows), steps)
            timing = summarize(measure(runner, plans))
            forward = CAPTURED if captured else "launched"
            rows.append([num_rows, context, kind, forward, timing.median_us, timing.p90_us])
    return rows


if __name__ == "__main__":
    main()
