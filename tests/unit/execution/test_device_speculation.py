"""Guesses verified by the accelerator's runner, over doubles of the kernels: the tokens of decoding one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_lite.execution.device_runner import DeviceRunner
from sglang_lite.execution.model_runner import ModelRunner
from sglang_lite.scheduler import Scheduler, SchedulerConfig
from sglang_lite.types import RequestFlags
from tests.support.host_device import HostDevice
from tests.support.scheduler_driver import request_columns
from tests.support.tiny_checkpoints import CASES, save_checkpoint
from tests.unit.execution.test_device_runner import (
    CONTEXT,
    NUM_PAGES,
    NUM_ROWS,
    PAGE_SIZE,
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


def generate(runner: ModelRunner | DeviceRunner, draft_tokens: int, sampling: dict[str, Any]) -> tuple[Any, int]:
    """Output tokens by request, and how many guesses were right."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            context_length=CONTEXT,
            max_running_requests=NUM_ROWS,
            overlap=False,
            draft_tokens=draft_tokens,
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
