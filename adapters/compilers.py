"""What FlashInfer needs to compile its kernels on first use, and what of it is missing.

It calls ``ninja``, a C++ compiler and ``nvcc`` from ``CUDA_HOME``, the path or /usr/local/cuda. None of them is needed
where the package ``flashinfer-jit-cache`` brings compiled kernels.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_lite.adapters.kernel_lines import FLASHINFER_VERSION, metadata_version

COMPILED_KERNELS = "flashinfer-jit-cache"
_DEFAULT_CUDA_HOME = "/usr/local/cuda"


@dataclass(frozen=True, slots=True)
class Machine:
    """Where programs and packages are looked up; tests put their own in.

    Attributes:
        environment: variables of the process.
        which: path of a program, None when it is not there.
        is_file: whether a path is a file.
        version_of: version of a distribution, None when it is not installed.
    """

    environment: Mapping[str, str]
    which: Callable[[str], str | None] = shutil.which
    is_file: Callable[[Path], bool] = Path.is_file
    version_of: Callable[[str], str | None] = metadata_version


def missing_compilers(machine: Machine | None = None) -> tuple[str, ...]:
    """What FlashInfer lacks to compile a kernel, each with what to do; empty when nothing is missing."""
    machine = machine or Machine(os.environ)
    if machine.version_of(COMPILED_KERNELS) is not None:
        return ()
    instead = f"or install {COMPILED_KERNELS} {FLASHINFER_VERSION}, which brings compiled kernels"
    problems = []
    home = machine.environment.get("CUDA_HOME") or machine.environment.get("CUDA_PATH")
    if home is not None or machine.which("nvcc") is None:
        home = home or _DEFAULT_CUDA_HOME
        if not machine.is_file(Path(home) / "bin" / "nvcc"):
            problems.append(
                f"FlashInfer compiles its kernels on first use and finds no nvcc ({home}/bin/nvcc): install the CUDA "
                f"toolkit and set CUDA_HOME, {instead}"
            )
    compiler = machine.environment.get("CXX", "c++")
    if machine.which(compiler) is None:
        problems.append(f"FlashInfer finds no C++ compiler ({compiler}): apt-get install g++, {instead}")
    if machine.which("ninja") is None:
        problems.append(f"FlashInfer finds no ninja: pip install ninja, {instead}")
    return tuple(problems)
