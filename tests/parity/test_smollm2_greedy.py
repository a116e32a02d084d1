"""The demo model gives the recorded greedy outputs, all prompts in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.execution.model_runner import ModelRunner
from sglang_lite.models.registry import load_model
from sglang_lite.scheduler.plan import LogprobRequest
from tests.support.step_plans import PlanMaker, PlannedSequence

PAGE_SIZE = 16
NUM_PAGES = 256
END_TOKEN = 2

pytestmark = pytest.mark.demo_model


@pytest.fixture(scope="module")
def runner(demo_model: Path) -> ModelRunner:
    ops = CpuOperations(workspace_bytes=256 << 20)
    model, description = load_model(demo_model, ops=ops, progress=False)
    geometry = KVGeometry(
        NUM_PAGES, PAGE_SIZE, description.num_layers, description.num_kv_heads, description.head_dim, torch.float32
    )
    return ModelRunner(model, ops, geometry, num_rows=16)


def test_greedy_outputs_and_logprobs(runner: ModelRunner, demo_goldens: list[dict[str, Any]]) -> None:
    """Token for token, and log-probabilities within 2e-3."""
    cases = demo_goldens
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    sequences = [PlannedSequence(row) for row in range(len(cases))]
    outputs: list[list[int]] = [[] for _ in cases]
    logprobs: list[list[float]] = [[] for _ in cases]
    running = list(range(len(cases)))
    while running:
        scored = [LogprobRequest(i, key, 0, 0, np.empty(0, np.int32), True, 0) for i, key in enumerate(running)]
        if not outputs[running[0]]:
            prefill = [(sequences[case], cases[case]["input_ids"]) for case in running]
            plan = maker.plan([], prefill, logprobs=scored)
        else:
            plan = maker.plan([sequences[case] for case in running], logprobs=scored)
        result = runner.run(plan)
        for place, case in enumerate(running):
            outputs[case].append(int(result.tokens[place]))
            logprobs[case].append(float(result.scored[place].logprobs[0]))
        running = [
            case
            for case in running
            if outputs[case][-1] != END_TOKEN and len(outputs[case]) < len(cases[case]["output_ids"])
        ]
    for case, output, scores in zip(cases, outputs, logprobs, strict=True):
        assert output == case["output_ids"], case["id"]
        np.testing.assert_allclose(scores, case["chosen_logprobs"], atol=2e-3, err_msg=case["id"])
