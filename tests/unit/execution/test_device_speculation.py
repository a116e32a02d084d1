"""Guesses verified by the accelerator's runner, over doubles of the kernels: the tokens of decoding one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.execution.build_draft import HeadPlan
from sglang_lite.execution.device_head import DeviceHeadPass
from sglang_lite.execution.device_runner import DeviceRunner
from sglang_lite.execution.draft_head import HeadDrafter, HostHeadPass
from sglang_lite.execution.draft_model import DraftModel
from sglang_lite.execution.model_runner import ModelRunner
from sglang_lite.models.dense import DenseDecoder
from sglang_lite.models.description import read_description
from sglang_lite.models.draft_head import load_draft_head
from sglang_lite.models.draft_head_config import eagle_head, next_token_head
from sglang_lite.scheduler import Scheduler, SchedulerConfig
from sglang_lite.types import RequestFlags
from tests.support.host_device import HostDevice
from tests.support.kernel_doubles import HOPPER
from tests.support.scheduler_driver import request_columns
from tests.support.tiny_checkpoints import CASES, save_checkpoint
from tests.support.tiny_heads import add_prediction_layer, save_eagle_head
from tests.unit.execution.test_device_runner import (
    CONTEXT,
    NUM_PAGES,
    NUM_ROWS,
    PAGE_SIZE,
    captured_runner,
    device_runner,
    host_runner,
    kernels,
)

__all__ = ["kernels"]

PROMPTS = [[5, 9, 33, 5, 9, 33, 5, 9], [3, 14, 15], [7] * 9, [1, 61, 80, 33, 98, 8]]
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "seed": np.arange(4) + 3},
    {"temperature": 0.3, "top_k": 5, "seed": np.arange(4) + 9},
    {"frequency_penalty": np.array([0.0, 0.5, 0.0, 0.0])},
)


def generate(
    runner: ModelRunner | DeviceRunner, draft_tokens: int, sampling: dict[str, Any], *, executor_drafts: bool = False
) -> tuple[Any, int]:
    """Output tokens by request, and how many guesses were right."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            context_length=CONTEXT,
            max_running_requests=NUM_ROWS,
            overlap=False,
            draft_tokens=draft_tokens,
            executor_drafts=executor_drafts,
        )
    )
    keys = list(range(1, len(PROMPTS) + 1))
    flags = RequestFlags.IGNORE_EOS
    scheduler.admit(request_columns(keys, PROMPTS, max_new_tokens=40, flags=flags, **sampling), 0.0)
    outputs: dict[int, list[int]] = {key: [] for key in keys}
    while (plan := scheduler.plan(0.0)) is not None:
        columns = scheduler.commit(runner.run(plan), 0.0)
        for key, token in zip(columns.key.tolist(), columns.token.tolist(), strict=True):
            outputs[key].append(token)
    scheduler.audit()
    return outputs, scheduler.stats().accepted_tokens


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded", "top-k", "penalty"])
def test_the_device_verifies_guesses(sampling: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(CASES["llama"], tmp_path)
    expected, _ = generate(host_runner(str(tmp_path)), 0, sampling)
    on_host, host_accepted = generate(host_runner(str(tmp_path)), 7, sampling)
    on_device, device_accepted = generate(device_runner(str(tmp_path), HostDevice()), 7, sampling)
    assert on_host == on_device == expected
    assert host_accepted == device_accepted
    if not sampling:
        assert host_accepted > 5, "the test says nothing when no guess is right"
    assert all(len(tokens) == 40 for tokens in expected.values())


@pytest.mark.parametrize("drafting", ["llama", "mistral"])
@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "seeded"])
def test_a_draft_model_on_the_device(sampling: dict[str, Any], drafting: str, tmp_path: Path) -> None:
    """Its steps are captured, and queued without waiting for one another."""
    for name in {"llama", drafting}:
        save_checkpoint(CASES[name], tmp_path / name)
    expected, _ = generate(host_runner(str(tmp_path / "llama")), 0, sampling)
    draft_runner = captured_runner(str(tmp_path / drafting), HostDevice())
    draft = DraftModel(
        draft_runner,
        draft_vocabulary=128,
        vocabulary=128,
        device=torch.device("cpu"),
        launch=lambda plan: draft_runner.launch(plan).result,
    )
    runner = device_runner(str(tmp_path / "llama"), HostDevice(), draft=draft)
    found, accepted = generate(runner, 5, sampling, executor_drafts=True)
    assert found == expected
    if drafting == "llama" and not sampling:
        assert accepted > 100, "the model guesses its own tokens"


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe", "llama"])
def test_a_draft_head_on_the_device(case: str, tmp_path: Path) -> None:
    """It guesses what it guesses on the host, and the output is that of decoding one by one."""
    target = tmp_path / case
    save_checkpoint(CASES[case], target)
    if case == "llama":
        save_eagle_head(tmp_path / "eagle")
        description = eagle_head(tmp_path / "eagle", read_description(target))
    else:
        add_prediction_layer(target, CASES[case].options["num_hidden_layers"])
        description = next_token_head(target, read_description(target))
    plan = HeadPlan(description)
    expected, _ = generate(host_runner(str(target)), 0, {})

    host = host_runner(str(target))
    ops = CpuOperations(measure=False)
    head = load_draft_head(description, model_of(host), ops=ops, dtype=torch.float32, context_length=CONTEXT)
    shape = plan.hidden_shape(host.geometry, NUM_ROWS, torch.float32, ops.device)
    host._draft = HeadDrafter(HostHeadPass(head, ops, plan.geometry(host.geometry)), shape)
    on_host, host_accepted = generate(host, 5, {}, executor_drafts=True)

    device = HostDevice()
    runner = device_runner(str(target), device)
    device_ops = CudaOperations(torch.device("cpu"), HOPPER, workspace_bytes=64)
    head = load_draft_head(description, model_of(runner), ops=device_ops, dtype=torch.float32, context_length=CONTEXT)
    runner._draft = HeadDrafter(DeviceHeadPass(head, device_ops, device, plan.geometry(runner.geometry)), shape)
    on_device, device_accepted = generate(runner, 5, {}, executor_drafts=True)
    assert on_device == on_host == expected
    assert device_accepted == host_accepted


def model_of(runner: ModelRunner | DeviceRunner) -> DenseDecoder:
    model = runner._model
    assert isinstance(model, DenseDecoder)
    return model
