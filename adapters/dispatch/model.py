"""What the dispatch table is made of, and how a provider is chosen from it. Free of torch and of the wheels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sglang_lite.adapters.kernel_lines import CUDA12, CUDA13, LINES

CUDA13_LINE = CUDA13.distribution
CUDA12_LINE = CUDA12.distribution

KNOWN_SMS = (75, 80, 86, 87, 89, 90, 100, 103, 107, 110, 120, 121)
"""SM versions that the table makes statements about; a compute capability (M, m) is SM version 10 * M + m."""

HALF = ("float16", "bfloat16")
ALL_FLOATS = ("float16", "bfloat16", "float32")


class Package(StrEnum):
    """Where an implementation comes from."""

    FLASHINFER = "flashinfer"
    SGL_KERNEL = "sgl_kernel"
    TORCH = "torch"


@dataclass(frozen=True, slots=True)
class SmVersions:
    """A set of SM versions, or every one from ``first`` on."""

    exactly: tuple[int, ...] = ()
    first: int | None = None

    def __contains__(self, sm: int) -> bool:
        return sm in self.exactly or (self.first is not None and sm >= self.first)

    def __str__(self) -> str:
        if self.first is not None:
            return "any" if self.first == 0 else f"{self.first} and newer"
        return ", ".join(map(str, self.exactly))


@dataclass(frozen=True, slots=True)
class Call:
    """A function of a wheel and the arguments that an adapter passes to it, all by name.

    Attributes:
        path: public path (``flashinfer.norm.rmsnorm``), ``Class.method``, or ``torch.ops.sgl_kernel.name``.
        arguments: parameter names. Operators registered with torch get them in the order of their schema.
    """

    path: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation of an operation.

    Attributes:
        package: where it comes from.
        name: tells providers of one package apart (``fa2``, ``fa3``), empty when there is one.
        calls: what an adapter calls; empty for plain torch.
        lines: kernel line -> SM versions it runs on. A line that is not listed does not have it.
        dtypes: element types of the activations.
        limits: what else it asks for, in words; empty when nothing.
    """

    package: Package
    calls: tuple[Call, ...]
    lines: Mapping[str, SmVersions]
    dtypes: tuple[str, ...]
    name: str = ""
    limits: str = ""

    @property
    def label(self) -> str:
        """``flashinfer fa3``."""
        return f"{self.package} {self.name}".strip()


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of the adapters and who implements it, the preferred provider first.

    Attributes:
        name: ``family.operation``.
        summary: what it computes, in a few words.
        providers: in the order of preference.
        otherwise: why there is nothing else, and what a user can do.
    """

    name: str
    summary: str
    providers: tuple[Provider, ...]
    otherwise: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """What a provider is chosen for.

    Attributes:
        sm: SM version of the device.
        line: distribution of the installed kernel line, None when there is none.
        has_flashinfer: FlashInfer is installed in the version of the table.
    """

    sm: int
    line: str | None
    has_flashinfer: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing serves an operation on a target."""

    operation: str
    reason: str


def select_from(operation: Operation, target: Target, dtype: str) -> Provider | Refusal:
    """The first provider that serves ``dtype`` on ``target``, or why each of them does not."""
    reasons = []
    for provider in operation.providers:
        problem = why_not(provider, target, dtype)
        if problem is None:
            return provider
        reasons.append(f"{provider.label}: {problem}")
    if operation.otherwise:
        reasons.append(operation.otherwise)
    return Refusal(operation.name, "; ".join(reasons))


def why_not(provider: Provider, target: Target, dtype: str) -> str | None:
    """None when ``provider`` serves ``dtype`` on ``target``, else the reason."""
    if dtype not in provider.dtypes:
        return f"takes {', '.join(provider.dtypes)}, not {dtype}"
    if provider.package is Package.TORCH:
        return None
    if provider.package is Package.FLASHINFER and not target.has_flashinfer:
        return "not installed in the version that the adapters are written against"
    if provider.package is Package.SGL_KERNEL and target.line is None:
        return "no kernel wheel of the versions that the adapters are written against is installed"
    versions = provider.lines.get(target.line or CUDA13_LINE)
    if versions is None:
        others = ", ".join(
            f"{line.distribution} {line.version}" for line in LINES if line.distribution in provider.lines
        )
        return f"{target.line} does not have it ({others} has)"
    if target.sm not in versions:
        return f"runs on SM {versions}, not on SM {target.sm}"
    return None
