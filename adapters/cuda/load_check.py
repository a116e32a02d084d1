"""Load torch and the kernel wheels and say how it went, as one line of JSON: ``python -m`` runs it in a process.

A library that does not fit may end the process that loads it, and a failed import leaves half of a package behind, so
that this is tried in a process of its own.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

MODULES = ("flashinfer", "sgl_kernel", "sgl_kernel.flash_attn")
"""What a run on a CUDA device imports."""

_MARK = "kernel-load-check: "


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading gave.

    Attributes:
        torch: release of torch, None when it cannot be imported.
        torch_cuda: CUDA version that torch was built with, None for a build without CUDA.
        torch_sees_device: torch finds a device.
        errors: module -> message of its failed import; modules that load are left out.
        crash: how the process ended, when it ended before it could report.
    """

    torch: str | None
    torch_cuda: str | None
    torch_sees_device: bool
    errors: dict[str, str]
    crash: str | None = None


def check(timeout_seconds: float = 180.0) -> LoadReport:
    """Load everything in another process."""
    command = [sys.executable, "-m", "sglang_lite.adapters.cuda.load_check"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        return LoadReport(None, None, False, {}, crash=f"loading took more than {timeout_seconds:.0f} s")
    for text in result.stdout.splitlines():
        if text.startswith(_MARK):
            return LoadReport(**json.loads(text.removeprefix(_MARK)))
    last = (result.stderr.strip().splitlines() or ["nothing was printed"])[-1]
    return LoadReport(None, None, False, {}, crash=f"the process ended with code {result.returncode}: {last}")


def load() -> LoadReport:
    """Load everything in this process."""
    errors: dict[str, str] = {}
    torch: Any = _attempt("torch", errors)
    for name in MODULES:
        if name.partition(".")[0] not in errors:
            _attempt(name, errors)
    return LoadReport(
        torch=None if torch is None else torch.__version__,
        torch_cuda=None if torch is None else torch.version.cuda,
        torch_sees_device=torch is not None and bool(torch.cuda.is_available()),
        errors=errors,
    )


def _attempt(name: str, errors: dict[str, str]) -> object | None:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a wheel that does not fit raises whatever its own start-up code raises
        errors[name] = f"{type(error).__name__}: {error}"
        return None


def main() -> int:
    """Print the report."""
    report = load()
    print(_MARK + json.dumps({name: getattr(report, name) for name in LoadReport.__slots__}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
