"""Failed imports of the kernel wheels, turned into causes and remedies."""

from __future__ import annotations

import pytest

from sglang_lite.adapters.kernel_lines import CUDA12, CUDA13, KernelLine
from sglang_lite.adapters.load_errors import explain, without_device_code

COMMON_OPS_FAILED = """
[sgl_kernel] CRITICAL: Could not load any common_ops library!

Attempted locations:
1. Architecture-specific pattern: /site/sgl_kernel/sm100/common_ops.* - found files: {files}
2. Fallback pattern: /site/sgl_kernel/common_ops.* - found files: []
3. Standard Python import: common_ops - failed

Error details from previous import attempts:
- ImportError: {error}
- ModuleNotFoundError: No module named 'common_ops'
"""
FOUND = "['/site/sgl_kernel/sm100/common_ops.abi3.so']"


def missing(library: str) -> str:
    return f"{library}: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("error", "line", "torch_cuda", "cause", "remedy"),
    [
        (missing("libcuda.so.1"), CUDA13, "13.0", "no CUDA driver", "NVIDIA driver"),
        (missing("libnvrtc.so.13"), CUDA13, None, "a build without CUDA", "torch 2.14.1 for CUDA 13"),
        (missing("libcudart.so.12"), CUDA12, None, "a build without CUDA", "torch 2.9.1 for CUDA 12"),
        (
            missing("libcudart.so.13"),
            CUDA13,
            "12.8",
            "built for CUDA 13, the installed torch for CUDA 12.8",
            "other kernel",
        ),
        (missing("libnvrtc.so.13"), CUDA13, "13.0", "libnvrtc.so.13 is missing", "pip install nvidia-cuda-nvrtc"),
        (missing("libcudart.so.12"), CUDA12, "12.8", "libcudart.so.12 is missing", "nvidia-cuda-runtime-cu12"),
        (missing("libcublasLt.so.12"), CUDA12, "12.8", "libcublasLt.so.12 is missing", "nvidia-cublas-cu12"),
        (missing("libnuma.so.1"), CUDA12, "12.8", "libnuma.so.1 is missing", "apt-get install libnuma1"),
        (
            "/x.so: undefined symbol: _ZN3c104cuda9SetDeviceEab",
            CUDA13,
            "13.0",
            "built for torch 2.14.1, installed is 2.13.0",
            "pip install torch==2.14.1",
        ),
        ("/x.so: undefined symbol: cuMulticastCreate", CUDA13, "13.0", "driver is older", "driver for CUDA 13"),
        (
            "/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found",
            CUDA13,
            "13.0",
            "GLIBCXX_3.4.30",
            "newer distribution",
        ),
        ("CUDA error: no kernel image is available for execution", CUDA13, "13.0", "no device code", "docs/kernels.md"),
        (
            "CUDA driver version is insufficient for CUDA runtime version",
            CUDA12,
            "12.8",
            "older than CUDA 12",
            "driver",
        ),
    ],
)
def test_loader_messages(error: str, line: KernelLine, torch_cuda: str | None, cause: str, remedy: str) -> None:
    whole = COMMON_OPS_FAILED.format(files=FOUND, error=error)
    for message in (whole, error):
        found = explain(message, line, torch="2.13.0", torch_cuda=torch_cuda)
        assert cause in found.cause
        assert remedy in found.remedy


def test_libraries_that_are_not_there() -> None:
    message = COMMON_OPS_FAILED.format(files="[]", error="nothing")
    found = explain(message, CUDA13, torch="2.14.1", torch_cuda="13.0")
    assert "not where they belong (/site/sgl_kernel/sm100/common_ops.*)" in found.cause
    assert "--force-reinstall sglang-kernel==0.4.10" in found.remedy


def test_other_messages_are_passed_on() -> None:
    missing_module = explain("No module named 'einops'", CUDA13, torch="2.14.1", torch_cuda="13.0")
    assert "einops is missing" in missing_module.cause
    unknown = explain("\nRuntimeError: something else\nmore", CUDA12, torch="2.9.1", torch_cuda="12.8")
    assert unknown.cause == "it does not load: RuntimeError: something else"
    assert "sglang-lite[cuda12]" in unknown.remedy


def test_device_code() -> None:
    assert without_device_code(CUDA13, 103) is None
    for line, sm in ((CUDA12, 103), (CUDA13, 121), (CUDA13, 75)):
        problem = without_device_code(line, sm)
        assert problem is not None
        assert f"no device code for SM {sm}" in problem.cause
