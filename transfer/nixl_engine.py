"""What of NIXL is there, what it runs on this machine, and how it wants spans and regions to be told."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import numpy as np

from sglang_lite.transfer.base import Capabilities, Int64Array, UInt64Array
from sglang_lite.transfer.tcp_wire import MAX_SPANS

MODULES = ("nixl_cu13", "nixl_cu12", "nixl")
"""Of the wheels; the first that is there is used."""

_ADAPTERS = Path("/sys/class/infiniband")


def load_module() -> Any:
    """NIXL's Python interface.

    Raises:
        ModuleNotFoundError: none of ``MODULES`` is installed.
        ImportError: it does not load.
    """
    for name in MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{name}._api")
    raise ModuleNotFoundError(f"none of {', '.join(MODULES)} is installed")


def prepare_environment() -> None:
    """Set what UCX and NIXL read when the first agent of a process starts; what is set already stays."""
    if not _has_adapter():
        # Also within one machine: what goes through shared memory would go on while the peer is stopped.
        os.environ.setdefault("UCX_TLS", "tcp,self,cuda_copy" if _has_cuda() else "tcp,self")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")


def kind_of(location: str) -> str:
    """NIXL's name of a kind of memory."""
    return "DRAM" if location.startswith("cpu") else "VRAM"


def device_of(location: str) -> int:
    """Number of the device; 0 for the host's memory."""
    kind, _, number = location.partition(":")
    return 0 if kind == "cpu" else int(number)


def rows_of(addr: int, offsets: Int64Array, lengths: Int64Array, location: str) -> UInt64Array:
    """uint64[n, 3]: address, length and device of each span, from the address that their offsets count from."""
    rows = np.empty((len(offsets), 3), dtype=np.uint64)
    rows[:, 0] = offsets.astype(np.uint64) + np.uint64(addr)
    rows[:, 1] = lengths
    rows[:, 2] = device_of(location)
    return rows


def errors_of(bindings: Any) -> tuple[type[Exception], ...]:
    """NIXL's own exceptions; they have no common base."""
    found = [value for name, value in vars(bindings).items() if name.startswith("nixl") and name.endswith("Error")]
    return tuple(error for error in found if isinstance(error, type) and issubclass(error, Exception))


def _has_cuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _has_adapter() -> bool:
    return _ADAPTERS.is_dir() and any(_ADAPTERS.iterdir())


def capabilities_of(module: Any) -> Capabilities:
    """What NIXL does here. UCX chooses what carries the bytes, so "tcp" is said only where it had no other choice."""
    package = module.__name__.split(".")[0]
    version = importlib.metadata.version(package.replace("_", "-"))
    chosen = os.environ.get("UCX_TLS", "all").split(",")
    protocol = "tcp" if "tcp" in chosen and not {"all", "rc", "ud", "dc", "shm", "ib"} & set(chosen) else "ucx"
    locations = {"host", "cuda"} if _has_cuda() else {"host"}
    return Capabilities("nixl", version, protocol, frozenset(locations), True, False, False, MAX_SPANS)
