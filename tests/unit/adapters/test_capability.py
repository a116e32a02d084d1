"""Devices: what they can do, and which one a run uses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang_lite.adapters.capability import ACCELERATORS, cuda_capability, require_bfloat16, resolve_device
from sglang_lite.types import StartupError


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


def test_cuda_that_is_there_lacks_an_executor() -> None:
    with pytest.raises(StartupError, match="missing capabilities: dense decoder executor for the cuda backend"):
        resolve_device("cuda", lambda device: None)
    with pytest.raises(StartupError, match="no driver"):
        resolve_device("cuda", lambda device: "no driver")


def test_choosing_the_host_imports_no_torch() -> None:
    code = (
        "import sys; from sglang_lite.adapters.capability import resolve_device; resolve_device('cpu'); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'sgl_kernel', 'flashinfer')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
