"""The published kernel wheels that the CUDA adapters are written against, and which of them are installed.

Two lines exist. Both install the import package ``sgl_kernel``, so that an environment has one of them; each needs
exactly one release of torch. Answers come from package metadata: nothing here imports torch or a wheel.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

FLASHINFER = "flashinfer-python"
FLASHINFER_VERSION = "0.7.2"


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One line of kernel wheels.

    Attributes:
        distribution, version: the wheel, as in the package metadata.
        torch: the release of torch it is built for.
        cuda: the major version of CUDA it is built for.
        extra: what to install, ``sglang-lite[extra]``.
    """

    distribution: str
    version: str
    torch: str
    cuda: int
    extra: str


CUDA13 = KernelLine("sglang-kernel", "0.4.10", torch="2.14.1", cuda=13, extra="cuda")
CUDA12 = KernelLine("sgl-kernel", "0.3.21", torch="2.9.1", cuda=12, extra="cuda12")

LINES = (CUDA13, CUDA12)


@dataclass(frozen=True, slots=True)
class InstalledKernels:
    """What the package metadata says.

    Attributes:
        line: the kernel line, None when none or more than one is installed.
        versions: distribution -> version of every kernel wheel that is installed, and of torch.
        has_flashinfer: FlashInfer is installed in the version that the adapters are written against.
        problems: what is missing or does not fit together, and what to do.
    """

    line: KernelLine | None
    versions: dict[str, str]
    has_flashinfer: bool
    problems: tuple[str, ...]


def metadata_version(distribution: str) -> str | None:
    """The installed version of a distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_kernels(version_of: Callable[[str], str | None] = metadata_version) -> InstalledKernels:
    """Find the installed line without importing anything.

    Args:
        version_of: version of a distribution, None when it is not installed.
    """
    names = (*(line.distribution for line in LINES), FLASHINFER, "torch")
    versions = {name: version for name in names if (version := version_of(name)) is not None}
    present = [line for line in LINES if line.distribution in versions]
    line = present[0] if len(present) == 1 else None
    problems = _line_problems(present, versions)
    flashinfer = versions.get(FLASHINFER)
    if flashinfer is None:
        problems.append(f"{FLASHINFER} is not installed: {_how_to_install(line or CUDA13)}")
    elif flashinfer != FLASHINFER_VERSION:
        problems.append(
            f"{FLASHINFER} {flashinfer} is installed; the adapters are written against {FLASHINFER_VERSION}: "
            f"pip install {FLASHINFER}=={FLASHINFER_VERSION}"
        )
    return InstalledKernels(
        line=line if line is not None and versions[line.distribution] == line.version else None,
        versions=versions,
        has_flashinfer=flashinfer == FLASHINFER_VERSION,
        problems=tuple(problems),
    )


def _line_problems(present: list[KernelLine], versions: dict[str, str]) -> list[str]:
    if not present:
        choices = " or ".join(f"'sglang-lite[{line.extra}]' (CUDA {line.cuda}, torch {line.torch})" for line in LINES)
        return [f"no kernel wheel is installed: pip install {choices}"]
    if len(present) > 1:
        both = " and ".join(line.distribution for line in present)
        return [
            f"{both} are both installed and overwrite each other: pip uninstall {both.replace(' and ', ' ')}, then "
            f"{_how_to_install(CUDA13)}"
        ]
    line, problems = present[0], []
    version = versions[line.distribution]
    if version != line.version:
        problems.append(
            f"{line.distribution} {version} is installed; the adapters are written against {line.version}: "
            f"{_how_to_install(line)}"
        )
    torch = versions.get("torch")
    if torch is None or torch.partition("+")[0] != line.torch:
        problems.append(
            f"{line.distribution} {line.version} is built for torch {line.torch}, installed is {torch or 'none'}: its "
            f"libraries do not load with another release; pip install torch=={line.torch}"
        )
    return problems


def _how_to_install(line: KernelLine) -> str:
    return f"pip install 'sglang-lite[{line.extra}]'"
