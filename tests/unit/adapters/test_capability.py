"""Devices: what they can do, and which one a run uses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang_lite.adapters.capability import (
    ACCELERATORS,
    ATTENTION_KINDS,
    CapabilityRecord,
    Support,
    capability_record,
    cuda_capability,
    probe_backend,
    require_bfloat16,
    require_operations,
    resolve_device,
    why_cuda_is_unavailable,
)
from sglang_lite.adapters.device_facts import DeviceFacts, read_driver
from sglang_lite.adapters.dispatch import KNOWN_SMS, TABLE
from sglang_lite.adapters.kernel_lines import installed_kernels
from sglang_lite.types import StartupError
from tests.support.fake_driver import FakeDevice, FakeDriver

CUDA13 = {"sglang-kernel": "0.4.10", "flashinfer-python": "0.7.2", "torch": "2.14.1+cu130"}
CUDA12 = {"sgl-kernel": "0.3.21", "flashinfer-python": "0.7.2", "torch": "2.9.1+cu128"}


def record(sm: tuple[int, int] | None, wheels: dict[str, str] = CUDA13, name: str = "Some Device") -> CapabilityRecord:
    facts = None if sm is None else DeviceFacts(0, name, sm, 80 << 30, 132)
    return capability_record(facts, installed_kernels(wheels.get))


@pytest.mark.parametrize(
    ("version", "float16", "bfloat16", "float8"),
    [
        ((5, 2), False, False, False),
        ((5, 3), True, False, False),
        ((7, 5), True, False, False),
        ((8, 0), True, True, False),
        ((8, 9), True, True, True),
        ((9, 0), True, True, True),
        ((10, 0), True, True, True),
    ],
)
def test_types_by_compute_capability(version: tuple[int, int], float16: bool, bfloat16: bool, float8: bool) -> None:
    capability = cuda_capability(version)
    assert (capability.float16, capability.bfloat16, capability.float8) == (float16, bfloat16, float8)


def test_bfloat16_is_required() -> None:
    require_bfloat16((8, 0))
    with pytest.raises(StartupError, match=r"7\.5.*8\.0 or newer"):
        require_bfloat16((7, 5))


def test_the_host_is_used_only_when_named() -> None:
    def unusable(device: str) -> str:
        assert device != "cpu"
        return f"no {device} here"

    assert resolve_device("cpu", unusable) == "cpu"
    with pytest.raises(StartupError) as caught:
        resolve_device("auto", unusable)
    message = str(caught.value)
    assert all(f"{device}: no {device} here" in message for device in ACCELERATORS)
    assert "--device cpu" in message


@pytest.mark.parametrize("device", ["metal", "rocm", "musa", "xpu", "npu", "hpu"])
def test_devices_without_a_provider(device: str) -> None:
    with pytest.raises(StartupError, match=f"--device {device}: no provider is registered.*cpu"):
        resolve_device(device)


@pytest.mark.parametrize(
    ("sm", "types"),
    [
        ((5, 2), {"float32"}),
        ((7, 5), {"float32", "float16"}),
        ((8, 0), {"float32", "float16", "bfloat16"}),
        ((8, 9), {"float32", "float16", "bfloat16", "float8_e4m3fn"}),
        ((10, 0), {"float32", "float16", "bfloat16", "float8_e4m3fn", "float4_e2m1fn"}),
    ],
)
def test_element_types_of_a_record(sm: tuple[int, int], types: set[str]) -> None:
    answers = record(sm).dtypes
    assert {name for name, answer in answers.items() if answer.support is Support.SUPPORTED} == types
    assert all(answer.support is not Support.UNKNOWN for answer in answers.values())
    assert "8.0 or newer" in record((7, 5)).dtypes["bfloat16"].detail


def test_attention_kinds_of_a_record() -> None:
    assert set(ATTENTION_KINDS.values()) <= set(TABLE)
    hopper, ampere, consumer = record((9, 0)), record((8, 0)), record((12, 0))
    assert {answer.support for answer in hopper.attention.values()} == {Support.SUPPORTED}
    assert hopper.attention["prefill"].detail == "flashinfer fa3"
    assert ampere.attention["prefill"].detail == "flashinfer fa2"
    assert ampere.attention["float8 cache"].support is Support.UNSUPPORTED
    assert "not on SM 80" in ampere.attention["float8 cache"].detail
    assert consumer.attention["latent with selected rows"].support is Support.UNSUPPORTED
    assert record((9, 0), {}).attention["decode"].support is Support.UNSUPPORTED


def test_what_was_not_asked_is_unknown() -> None:
    nothing = record(None)
    answers = [*nothing.dtypes.values(), *nothing.attention.values()]
    assert {answer.support for answer in answers} == {Support.UNKNOWN}
    with pytest.raises(StartupError, match="no CUDA device was found"):
        _ = nothing.target
    newer = record((19, 0))
    assert 190 not in KNOWN_SMS
    assert {answer.support for answer in newer.attention.values()} == {Support.UNKNOWN}
    assert newer.dtypes["bfloat16"].support is Support.SUPPORTED


def test_a_name_decides_nothing() -> None:
    assert record((8, 9), name="NVIDIA H100") == record((8, 9), name="")


def test_missing_operations_are_named_all_at_once() -> None:
    chosen = require_operations(record((9, 0)), ["norm.rms", "attention.decode"], "bfloat16")
    assert [provider.label for provider in chosen.values()] == ["flashinfer", "flashinfer fa2"]
    needed = ["norm.rms", "speculation.tree_build", "linear.marlin"]
    assert set(require_operations(record((9, 0), CUDA12), needed, "bfloat16")) == set(needed)
    with pytest.raises(
        StartupError, match=r"missing required capabilities: speculation\.tree_build .*, linear\.marlin"
    ):
        require_operations(record((9, 0)), needed, "bfloat16")


def test_everything_that_cuda_lacks_is_said_at_once() -> None:
    def reason(device: FakeDevice | None, wheels: dict[str, str]) -> str | None:
        driver = FakeDriver([] if device is None else [device])
        return why_cuda_is_unavailable(lambda: read_driver(lambda: driver), lambda: installed_kernels(wheels.get))

    assert reason(FakeDevice(), CUDA13) is None
    old = reason(FakeDevice(compute_capability=(7, 5)), {"torch": "2.13.0+cpu"})
    assert old is not None
    assert all(
        part in old for part in ("7.5", "8.0 or newer", "no kernel wheel is installed", "flashinfer-python is not")
    )
    nothing = reason(None, {})
    assert nothing is not None
    assert "sees no device" in nothing
    assert "no kernel wheel is installed" in nothing


def test_probing_an_accelerator_without_provider() -> None:
    assert probe_backend("xpu") == "no provider is registered for it; registered are cpu, cuda"


def test_cuda_that_is_there_lacks_an_executor() -> None:
    with pytest.raises(StartupError, match="missing capabilities: dense decoder executor for the cuda backend"):
        resolve_device("cuda", lambda device: None)
    with pytest.raises(StartupError, match="no driver"):
        resolve_device("cuda", lambda device: "no driver")


def test_choosing_a_device_imports_no_torch() -> None:
    code = (
        "import sys; from sglang_lite.adapters.capability import resolve_device; resolve_device('cpu')\n"
        "try: resolve_device('auto')\nexcept Exception: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'sgl_kernel', 'flashinfer')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
