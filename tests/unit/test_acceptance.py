"""The acceptance entry: it runs on doubles of a device, and refuses to pass where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from sglang_lite import acceptance, cli
from sglang_lite.adapters.cuda.load_check import LoadReport
from sglang_lite.adapters.device_facts import DeviceFacts, read_driver
from sglang_lite.adapters.kernel_lines import InstalledKernels, installed_kernels
from sglang_lite.adapters.verification import Subject
from sglang_lite.adapters.verification.sampling_cases import sampling_cases
from sglang_lite.environment import Environment
from tests.support.fake_driver import FakeDevice, FakeDriver
from tests.support.kernel_doubles.everything import doubled_subject, installed_everything

ROOT = Path(__file__).parents[2]
CUDA13 = {"sglang-kernel": "0.4.10", "flashinfer-python": "0.7.2", "torch": "2.14.1+cu130"}


def machine(devices: Sequence[FakeDevice] = (FakeDevice(),)) -> Environment:
    driver = FakeDriver(devices)
    loaded = LoadReport("2.14.1+cu130", "13.0", True, {})
    kernels = installed_kernels(CUDA13.get)
    return Environment(lambda: read_driver(lambda: driver), lambda: kernels, lambda: loaded, lambda: ())


def doubled(facts: DeviceFacts, kernels: InstalledKernels, dtype: torch.dtype) -> Subject:
    assert kernels.line is not None
    return doubled_subject(kernels.line.distribution, facts.sm, dtype)


def test_the_table_of_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(acceptance, "SEEDS", (0,))
    with installed_everything("sglang-kernel"):
        assert acceptance.run(machine(), doubled) == 0
    text = capsys.readouterr().out
    assert ", 0 failed, " in text
    assert all(re.search(rf"pass +Operations\.attention +{dtype}", text) for dtype in ("bfloat16", "float16"))


def test_a_failure_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(acceptance, "SEEDS", (0,))

    def without_sampling(facts: DeviceFacts, kernels: InstalledKernels, dtype: torch.dtype) -> Subject:
        return Subject(doubled(facts, kernels, dtype).operations)

    monkeypatch.setattr(acceptance, "FAMILIES", (sampling_cases,))
    with installed_everything("sglang-kernel"):
        assert acceptance.run(machine(), without_sampling) == 1
    assert "ERROR: SamplingOperations.softmax" in capsys.readouterr().out


def test_without_a_device_it_says_why_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert acceptance.run(machine([])) == 1
    assert "verify: did not run: the CUDA driver sees no device" in capsys.readouterr().out


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(acceptance, "why_not_run", lambda environment=None: "there is no GPU")
    assert cli.main(["check-env", "--verify"]) == 1
    assert "verify: did not run: there is no GPU" in capsys.readouterr().out


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a process that sees no device, whatever this machine has."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""}


def test_gpu_tests_are_skipped_with_the_reason_and_do_not_pass(no_driver: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
    result = subprocess.run(command, cwd=ROOT, env=no_driver, capture_output=True, text=True, check=False)
    assert "no GPU acceptance on this machine: " in result.stdout
    assert "passed" not in result.stdout
    assert result.returncode != 0


def test_gpu_tests_are_part_of_no_default_run(no_driver: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(command, cwd=ROOT, env=no_driver, capture_output=True, text=True, check=False)
    assert "deselected" in result.stdout
    assert result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
