"""The executor of the first CUDA device with the demo model: recorded outputs, captured or not, and how fast.

Weights are bfloat16 here and float32 in the recording, so that long outputs part somewhere; they must not part early.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_lite.config import ServerConfig
from sglang_lite.execution.base import Executor
from sglang_lite.execution.build import EngineLimits, build_executor
from sglang_lite.models.description import read_description
from tests.support.step_plans import PlanMaker, PlannedSequence

pytestmark = [pytest.mark.gpu, pytest.mark.demo_model, pytest.mark.timeout(1800)]

WAYS = {"captured": {}, "launched": {"disable_cuda_graph": True}, "side by side": {"enable_pdmux": True}}
ROWS, STEPS, IN_FLIGHT = 64, 128, 2
SAME_TOKENS = 8
"""So many first tokens of an output are compared."""


@pytest.fixture(scope="module", params=sorted(WAYS))
def served(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[tuple[Executor, EngineLimits]]:
    options: dict[str, Any] = {"max_running_requests": ROWS, "max_total_tokens": 64 * 1024, **WAYS[request.param]}
    config = ServerConfig(model_path=str(demo_model), device="cuda", random_seed=1, **options)
    executor, limits = build_executor(config, read_description(demo_model), directory=demo_model)
    yield executor, limits
    executor.close()


def generate(executor: Executor, maker: PlanMaker, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of all prompts in one batch, two steps in flight; prompts join while others decode."""
    sequences = [PlannedSequence(row) for row in range(len(prompts))]
    outputs: list[list[int]] = [[] for _ in prompts]
    in_flight: deque[list[int]] = deque()

    def collect() -> None:
        for row, token in zip(in_flight.popleft(), executor.collect().tokens.tolist(), strict=True):
            outputs[row].append(token)

    half = len(prompts) // 2
    joined: list[int] = []
    for first in (range(half), range(half, len(prompts))):
        chunks = [(sequences[row], prompts[row]) for row in first]
        executor.submit(maker.plan([sequences[row] for row in joined], chunks))
        in_flight.append([*joined, *first])
        joined += first
    for _ in range(count):
        executor.submit(maker.plan(sequences))
        in_flight.append(list(range(len(prompts))))
        while len(in_flight) >= IN_FLIGHT:
            collect()
    while in_flight:
        collect()
    return outputs


def test_recorded_outputs(served: tuple[Executor, EngineLimits], demo_goldens: list[dict[str, Any]]) -> None:
    executor, limits = served
    maker = PlanMaker(limits.geometry.page_size, limits.geometry.num_pages)
    outputs = generate(executor, maker, [case["input_ids"] for case in demo_goldens], SAME_TOKENS)
    same = [
        np.mean([got == recorded for got, recorded in zip(output, case["output_ids"][:SAME_TOKENS], strict=False)])
        for output, case in zip(outputs, demo_goldens, strict=True)
    ]
    assert [output[0] for output in outputs] == [case["output_ids"][0] for case in demo_goldens]
    assert np.mean(same) > 0.85, dict(zip([case["id"] for case in demo_goldens], same, strict=True))


def test_speed(
    served: tuple[Executor, EngineLimits], request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """No bound, a report: tokens a second of a full batch and the time of a step."""
    executor, limits = served
    maker = PlanMaker(limits.geometry.page_size, limits.geometry.num_pages)
    prompts = np.random.default_rng(0).integers(10, 40_000, (ROWS, 64)).tolist()
    generate(executor, maker, prompts, 8)
    started = time.perf_counter()
    outputs = generate(executor, maker, prompts, STEPS)
    seconds = time.perf_counter() - started
    assert all(len(output) >= STEPS for output in outputs)
    with capsys.disabled():
        print(
            f"\n{request.node.name}: {ROWS * STEPS / seconds:.0f} tokens/s at {ROWS} rows, "
            f"{1e3 * seconds / STEPS:.2f} ms a step"
        )
