"""The report of ``check-env`` over given devices, wheels and load results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from sglang_lite import environment
from sglang_lite.adapters import capability
from sglang_lite.adapters.cuda.load_check import LoadReport
from sglang_lite.adapters.device_facts import read_driver
from sglang_lite.adapters.kernel_lines import installed_kernels
from sglang_lite.environment import Environment, report
from tests.support.fake_driver import FakeDevice, FakeDriver

CUDA13 = {"sglang-kernel": "0.4.10", "flashinfer-python": "0.7.2", "torch": "2.14.1+cu130"}
LOADED = LoadReport("2.14.1+cu130", "13.0", True, {})


def machine(
    devices: Sequence[FakeDevice] = (FakeDevice(),),
    wheels: dict[str, str] = CUDA13,
    load: Callable[[], LoadReport] = lambda: LOADED,
    missing: tuple[str, ...] = (),
) -> Environment:
    driver = FakeDriver(devices)
    kernels = installed_kernels(wheels.get)
    return Environment(lambda: read_driver(lambda: driver), lambda: kernels, load, lambda: missing)


def not_loaded() -> LoadReport:
    raise AssertionError("nothing to load here")


def test_a_machine_that_is_ready(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "MODEL_EXECUTORS", ("cpu", "cuda"))
    assert report(machine()) == 0
    text = capsys.readouterr().out
    assert "CUDA driver: runs CUDA up to 13.0" in text
    assert "device 0: Some Device, compute capability 9.0 (SM 90), 80.0 GiB, 132 multiprocessors" in text
    assert "float8_e4m3fn                    supported: from compute capability 8.9 on" in text
    assert "prefill                          supported: flashinfer fa3" in text
    assert "norm.rms                         flashinfer" in text
    assert "speculation.tree_build           none: sgl_kernel: sglang-kernel does not have it" in text
    assert "cuda: ready (--device cuda)" in text


def test_no_executor_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "MODEL_EXECUTORS", ("cpu",))
    assert report(machine()) == 1
    assert "no model executor" in capsys.readouterr().out


def test_no_device_and_no_wheels(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(machine([], {}, not_loaded)) == 1
    text = capsys.readouterr().out
    assert "the CUDA driver sees no device" in text
    assert "no kernel wheel is installed" in text
    assert "nothing about GPUs is claimed" in text
    assert "cpu: ready" in text


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (LoadReport("2.14.1", "13.0", True, {"sgl_kernel": "ImportError: undefined symbol: _ZN2at1xE"}),
         "import sgl_kernel: the wheel is built for torch 2.14.1, installed is 2.14.1"),
        (LoadReport("2.14.1+cpu", None, False, {"sgl_kernel": "libnvrtc.so.13: cannot open shared object file"}),
         "torch 2.14.1+cpu is a build without CUDA"),
        (LoadReport("2.14.1+cu130", "13.0", False, {}), "finds no device: the driver may be older"),
        (LoadReport(None, None, False, {}, crash="the process ended with code -11: nothing was printed"),
         "loading the wheels: the process ended with code -11"),
    ],
)  # fmt: skip
def test_wheels_that_do_not_load(load: LoadReport, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(machine(load=lambda: load)) == 1
    assert expected in capsys.readouterr().out


def test_everything_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    old = FakeDevice("Old", (7, 5))
    assert report(machine([old, FakeDevice("New", (12, 1))], {**CUDA13, "torch": "2.13.0+cpu"})) == 1
    text = capsys.readouterr().out
    assert "device 0: this CUDA device has compute capability 7.5" in text
    assert "built for torch 2.14.1, installed is 2.13.0+cpu" in text
    assert "device 1: sglang-kernel 0.4.10 holds no device code for SM 121" in text
    assert "bfloat16                         unsupported: needs compute capability 8.0 or newer" in text


def test_a_missing_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(machine(missing=("FlashInfer finds no ninja",))) == 1
    assert "  - FlashInfer finds no ninja" in capsys.readouterr().out


def test_only_registered_executors_are_named() -> None:
    assert set(capability.MODEL_EXECUTORS) <= set(capability.PROVIDERS)
