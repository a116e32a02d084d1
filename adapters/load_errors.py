"""What a failed import of a kernel wheel means and what to do about it.

The libraries of a wheel are built for one release of torch and one major version of CUDA, and they find the CUDA
libraries that the CUDA build of torch brings along. The loader's messages name a library or a symbol; this turns them
into a cause and a remedy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sglang_lite.adapters.dispatch.wheels import COMMON_OPS
from sglang_lite.adapters.kernel_lines import KernelLine


@dataclass(frozen=True, slots=True)
class LoadProblem:
    """Why a wheel does not load.

    Attributes:
        cause: in one sentence.
        remedy: what to do.
    """

    cause: str
    remedy: str


_MISSING_LIBRARY = re.compile(r"(lib[\w.+-]+\.so(?:\.\d+)*): cannot open shared object file")
_UNDEFINED_SYMBOL = re.compile(r"undefined symbol: (\w+)")
_MISSING_VERSION = re.compile(r"version [`'](GLIBC(?:XX)?_[\d.]+)' not found")
_FOUND_NOTHING = re.compile(r"Architecture-specific pattern: (\S+) - found files: \[\]")
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")


def explain(message: str, line: KernelLine, *, torch: str | None, torch_cuda: str | None) -> LoadProblem:
    """The cause behind the message of a failed import.

    Args:
        message: of the exception, all of it; the wheel puts the loader's messages of every try into one.
        line: the installed kernel line.
        torch: installed release of torch, None without it.
        torch_cuda: CUDA version that torch was built with, None for a build without CUDA.
    """
    if (symbol := _UNDEFINED_SYMBOL.search(message)) is not None:
        return _undefined_symbol(symbol.group(1), line, torch)
    if (version := _MISSING_VERSION.search(message)) is not None:
        return LoadProblem(
            f"this system's C library is older than the wheel needs ({version.group(1)})",
            "use a newer distribution or a CUDA container image",
        )
    if (library := _MISSING_LIBRARY.search(message)) is not None:
        return _missing_library(library.group(1), line, torch_cuda)
    if "no kernel image is available" in message:
        return LoadProblem("the wheel holds no device code for this SM version", "see docs/kernels.md for the versions")
    if "driver version is insufficient" in message:
        return LoadProblem(f"the driver is older than CUDA {line.cuda} needs", "install a newer NVIDIA driver")
    if (pattern := _FOUND_NOTHING.search(message)) is not None:
        return LoadProblem(
            f"the wheel's libraries are not where they belong ({pattern.group(1)})",
            f"install it again: pip install --force-reinstall {line.distribution}=={line.version}",
        )
    if (module := _NO_MODULE.search(message)) is not None and module.group(1) != "common_ops":
        return LoadProblem(
            f"the Python module {module.group(1)} is missing", f"pip install 'sglang-lite[{line.extra}]'"
        )
    first = next((text.strip() for text in message.splitlines() if text.strip()), "no message")
    return LoadProblem(f"it does not load: {first}", f"install it again: pip install 'sglang-lite[{line.extra}]'")


def without_device_code(line: KernelLine, sm: int) -> LoadProblem | None:
    """Why the line's libraries hold nothing for an SM version, None when they do."""
    versions = COMMON_OPS[line.distribution]
    if sm in versions:
        return None
    return LoadProblem(
        f"{line.distribution} {line.version} holds no device code for SM {sm}; it has SM {versions}",
        "operations of FlashInfer and torch remain; docs/kernels.md says which",
    )


def _undefined_symbol(symbol: str, line: KernelLine, torch: str | None) -> LoadProblem:
    if symbol.startswith("cu") and symbol[2:3].isupper():
        return LoadProblem(
            f"the driver is older than the wheel needs (it lacks {symbol})", f"install a driver for CUDA {line.cuda}"
        )
    return LoadProblem(
        f"the wheel is built for torch {line.torch}, installed is {torch or 'none'} (undefined symbol {symbol})",
        f"pip install torch=={line.torch}",
    )


def _missing_library(library: str, line: KernelLine, torch_cuda: str | None) -> LoadProblem:
    name = library.split(".so")[0]
    if name == "libcuda":
        return LoadProblem(
            f"no CUDA driver ({library} is missing)",
            "install the NVIDIA driver, or start the container with access to its GPUs",
        )
    if name in ("libnuma",):
        return LoadProblem(f"{library} is missing", "apt-get install libnuma1")
    if torch_cuda is None:
        return LoadProblem(
            f"the installed torch is a build without CUDA, so that {library} is missing",
            f"install the build of torch {line.torch} for CUDA {line.cuda} from its own package index",
        )
    major = torch_cuda.split(".")[0]
    if major != str(line.cuda):
        return LoadProblem(
            f"the wheel is built for CUDA {line.cuda}, the installed torch for CUDA {torch_cuda}: {library} is missing",
            f"install the build of torch {line.torch} for CUDA {line.cuda}, or the other kernel line",
        )
    package = {"libcudart": "cuda-runtime", "libnvrtc": "cuda-nvrtc", "libcublas": "cublas", "libcublasLt": "cublas"}
    if name in package:
        suffix = "" if line.cuda >= 13 else f"-cu{line.cuda}"
        return LoadProblem(f"{library} is missing", f"pip install nvidia-{package[name]}{suffix}")
    return LoadProblem(
        f"{library} is missing", f"pip install torch=={line.torch}, whose build for CUDA brings it along"
    )
