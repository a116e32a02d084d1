"""What a device can do, from facts about it, and which device a run uses.

Facts come from the driver and from package metadata; nothing here imports torch or a GPU wheel. A record answers for
element types and kinds of attention with supported, unsupported or unknown, and chooses providers by SM version and
installed wheels only: never by a product's name, never by trying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from sglang_lite.adapters.device_facts import CudaDriver, DeviceFacts, read_driver
from sglang_lite.adapters.dispatch import KNOWN_SMS, Provider, Refusal, Target, select
from sglang_lite.adapters.kernel_lines import InstalledKernels, installed_kernels
from sglang_lite.types import StartupError

PROVIDERS = ("cpu", "cuda")
"""Devices with operations in this package."""

MODEL_EXECUTORS = ("cpu", "cuda")
"""Devices that models run on in this release."""

ACCELERATORS = ("cuda", "rocm", "metal", "musa", "xpu", "npu", "hpu")
"""Devices that ``auto`` may choose from, in this order. The host is not among them: it is only used when named."""

ATTENTION_KINDS = {
    "prefill": "attention.prefill",
    "decode": "attention.decode",
    "sliding window": "attention.window",
    "logit soft cap": "attention.soft_cap",
    "sinks": "attention.sinks",
    "float8 cache": "attention.fp8_cache",
    "shared-prefix cascade": "attention.cascade",
    "latent": "latent.attention",
    "latent with selected rows": "latent.selected",
}
"""Kind of attention -> its operation in the dispatch table."""

_SINCE = {"float16": (5, 3), "bfloat16": (8, 0), "float8_e4m3fn": (8, 9), "float4_e2m1fn": (10, 0)}
"""Element type -> the compute capability from which hardware computes with it."""


@dataclass(frozen=True, slots=True)
class Capability:
    """Element types a device computes with in hardware."""

    float16: bool
    bfloat16: bool
    float8: bool


class Support(StrEnum):
    """Unknown is an answer of its own: it is neither promised nor refused."""

    SUPPORTED = "supported"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether something is supported, and by what or why not."""

    support: Support
    detail: str


@dataclass(frozen=True, slots=True)
class CapabilityRecord:
    """What one device with the installed wheels can do.

    Attributes:
        sm: SM version, None when no device was asked.
        line: distribution of the installed kernel line, None without one.
        has_flashinfer: FlashInfer is installed in the version of the dispatch table.
        dtypes: element type -> answer.
        attention: kind (``ATTENTION_KINDS``) -> answer, for bfloat16.
    """

    sm: int | None
    line: str | None
    has_flashinfer: bool
    dtypes: Mapping[str, Answer]
    attention: Mapping[str, Answer]

    @property
    def target(self) -> Target:
        """What ``dispatch.select`` is asked with.

        Raises:
            StartupError: no device was asked, so that nothing can be chosen.
        """
        if self.sm is None:
            raise StartupError("no CUDA device was found, so that no provider can be chosen; run sglang-lite check-env")
        return Target(self.sm, self.line, self.has_flashinfer)


def capability_record(facts: DeviceFacts | None, kernels: InstalledKernels) -> CapabilityRecord:
    """The record of a device and the installed wheels; without a device every answer is unknown."""
    line = None if kernels.line is None else kernels.line.distribution
    target = None if facts is None else Target(facts.sm, line, kernels.has_flashinfer)
    return CapabilityRecord(
        sm=None if facts is None else facts.sm,
        line=line,
        has_flashinfer=kernels.has_flashinfer,
        dtypes={name: _dtype_answer(facts, since) for name, since in {"float32": (0, 0), **_SINCE}.items()},
        attention={kind: _attention_answer(target, operation) for kind, operation in ATTENTION_KINDS.items()},
    )


def _dtype_answer(facts: DeviceFacts | None, since: tuple[int, int]) -> Answer:
    if facts is None:
        return Answer(Support.UNKNOWN, "no device was asked")
    needed = f"{since[0]}.{since[1]}"
    if facts.compute_capability < since:
        return Answer(Support.UNSUPPORTED, f"needs compute capability {needed} or newer")
    return Answer(Support.SUPPORTED, f"from compute capability {needed} on" if since[0] else "everywhere")


def _attention_answer(target: Target | None, operation: str) -> Answer:
    if target is None:
        return Answer(Support.UNKNOWN, "no device was asked")
    if target.sm not in KNOWN_SMS:
        return Answer(
            Support.UNKNOWN, f"nothing is known of SM {target.sm}; known are {', '.join(map(str, KNOWN_SMS))}"
        )
    choice = select(operation, target, "bfloat16")
    if isinstance(choice, Refusal):
        return Answer(Support.UNSUPPORTED, choice.reason)
    return Answer(Support.SUPPORTED, choice.label)


def require_operations(record: CapabilityRecord, operations: Iterable[str], dtype: str) -> dict[str, Provider]:
    """The provider of each operation that a model needs.

    Args:
        record: of the device.
        operations: names of the dispatch table.
        dtype: of the activations, ``bfloat16``.

    Raises:
        StartupError: names every operation that nothing serves, with the reasons, all at once.
    """
    target = record.target
    chosen = {name: select(name, target, dtype) for name in operations}
    missing = [f"{name} ({choice.reason})" for name, choice in chosen.items() if isinstance(choice, Refusal)]
    if missing:
        raise StartupError(
            f"--device cuda (SM {target.sm}, {target.line or 'no kernel wheel'}) is missing required capabilities: "
            f"{', '.join(missing)}"
        )
    return {name: choice for name, choice in chosen.items() if isinstance(choice, Provider)}


def cuda_capability(compute_capability: tuple[int, int]) -> Capability:
    """Types supported from a compute capability on: FP16 from 5.3, BF16 from 8.0, FP8 from 8.9."""
    return Capability(
        float16=compute_capability >= _SINCE["float16"],
        bfloat16=compute_capability >= _SINCE["bfloat16"],
        float8=compute_capability >= _SINCE["float8_e4m3fn"],
    )


def require_bfloat16(compute_capability: tuple[int, int]) -> None:
    """Raise StartupError for a CUDA device without BF16."""
    if not cuda_capability(compute_capability).bfloat16:
        major, minor = compute_capability
        raise StartupError(
            f"this CUDA device has compute capability {major}.{minor}; models run in BF16, which needs compute "
            "capability 8.0 or newer"
        )


def why_cuda_is_unavailable(
    driver: Callable[[], CudaDriver] = read_driver, kernels: Callable[[], InstalledKernels] = installed_kernels
) -> str | None:
    """None when a CUDA device and the wheels it needs are there, else everything that is missing."""
    found = driver()
    problems = [] if found.problem is None else [found.problem]
    if found.devices:
        try:
            require_bfloat16(found.devices[0].compute_capability)
        except StartupError as error:
            problems.append(str(error))
    problems += kernels().problems
    return "; ".join(problems) or None


def probe_backend(device: str) -> str | None:
    """None when an accelerator can be used, else the reason why not. Loads neither torch nor a wheel."""
    if device not in PROVIDERS:
        return f"no provider is registered for it; registered are {', '.join(PROVIDERS)}"
    return why_cuda_is_unavailable()


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
    # One line: the first reason of each, and the same one once.
    reasons: dict[str, list[str]] = {}
    for device, problem in problems.items():
        reasons.setdefault(problem.partition(";")[0].partition(" (")[0], []).append(device)
    tried = "; ".join(f"{', '.join(devices)}: {reason}" for reason, devices in reasons.items())
    raise StartupError(
        f"--device auto: no executable production backend was detected ({tried}); auto never falls back to the host\n"
        "Say --device cpu to run on the host; sglang-lite check-env says what a GPU needs here."
    )


def _with_executor(device: str) -> str:
    """The device, if a model executor for it exists."""
    if device not in MODEL_EXECUTORS:
        raise StartupError(
            f"--device {device}: missing capabilities: dense decoder executor for the {device} backend, runtime-owned "
            f"KV cache allocation. This release runs models with --device {' or '.join(MODEL_EXECUTORS)} only."
        )
    return device
