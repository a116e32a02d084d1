"""What a device can do, from facts about it, and which device a run uses.

Nothing here imports torch or a GPU wheel until a device other than the host is looked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from sglang_lite.types import StartupError

PROVIDERS = ("cpu", "cuda")
"""Devices with operations in this package. ``cuda`` has no executor for models in this release."""

ACCELERATORS = ("cuda", "rocm", "metal", "musa", "xpu", "npu", "hpu")
"""Devices that ``auto`` may choose from, in this order. The host is not among them: it is only used when named."""


@dataclass(frozen=True, slots=True)
class Capability:
    """Element types a device computes with in hardware."""

    float16: bool
    bfloat16: bool
    float8: bool


def cuda_capability(compute_capability: tuple[int, int]) -> Capability:
    """Types supported from a compute capability on: FP16 from 5.3, BF16 from 8.0, FP8 from 8.9."""
    return Capability(
        float16=compute_capability >= (5, 3),
        bfloat16=compute_capability >= (8, 0),
        float8=compute_capability >= (8, 9),
    )


def require_bfloat16(compute_capability: tuple[int, int]) -> None:
    """Raise StartupError for a CUDA device without BF16."""
    if not cuda_capability(compute_capability).bfloat16:
        major, minor = compute_capability
        raise StartupError(
            f"this CUDA device has compute capability {major}.{minor}; models run in BF16, which needs compute "
            "capability 8.0 or newer"
        )


def probe_cuda() -> str | None:
    """None when a CUDA device and the wheels it needs are there, else what is missing."""
    missing = [wheel for wheel in ("sgl_kernel", "flashinfer") if importlib.util.find_spec(wheel) is None]
    import torch

    if torch.version.cuda is None:
        return "this torch build has no CUDA support"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if missing:
        return f"not installed: {', '.join(missing)} (pip install 'sglang-lite[cuda]')"
    return None


def probe_backend(device: str) -> str | None:
    """None when an accelerator can be used, else the reason why not."""
    if device not in PROVIDERS:
        return "no provider is registered in this release"
    return probe_cuda()


def resolve_device(requested: str, probe: Callable[[str], str | None] = probe_backend) -> str:
    """The device of a run; called before weights are read.

    Args:
        requested: a device name, or ``auto`` for the first accelerator that works.
        probe: why an accelerator cannot be used, or None.

    Raises:
        StartupError: the device has no provider, is not there, or ``auto`` found none. Nothing falls back to the host.
    """
    if requested == "cpu":
        return "cpu"
    if requested == "auto":
        return _first_working(probe)
    if requested not in PROVIDERS:
        raise StartupError(
            f"--device {requested}: no provider is registered for it; registered are {', '.join(PROVIDERS)}"
        )
    problem = probe(requested)
    if problem is not None:
        raise StartupError(f"--device {requested} cannot be used: {problem}. To run on the host: --device cpu")
    return _with_executor(requested)


def _first_working(probe: Callable[[str], str | None]) -> str:
    problems = {}
    for device in ACCELERATORS:
        problem = probe(device)
        if problem is None:
            return _with_executor(device)
        problems[device] = problem
    tried = "; ".join(f"{device}: {problem}" for device, problem in problems.items())
    raise StartupError(
        f"--device auto: no executable production backend was detected ({tried}). auto never falls back to the host: "
        "to run on it, say --device cpu"
    )


def _with_executor(device: str) -> str:
    """The device, if a model executor for it exists."""
    if device == "cuda":
        raise StartupError(
            "--device cuda: missing capabilities: dense decoder executor for the cuda backend, runtime-owned KV cache "
            "allocation. This release runs models with --device cpu only."
        )
    return device
