"""The kernel wheels, loaded on first use.

Everything under ``adapters/cuda`` takes its functions from here, so that importing the package costs nothing and a
machine without the wheels learns what is missing when it asks for the device.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sglang_lite.types import StartupError


@dataclass(frozen=True, slots=True)
class Wheels:
    """The modules of one process.

    Attributes:
        flashinfer, sgl_kernel: the packages; their attributes are untyped.
    """

    flashinfer: Any
    sgl_kernel: Any


def load_wheels() -> Wheels:
    """Import both wheels, with the submodules that their packages do not load by themselves.

    Raises:
        StartupError: one cannot be imported; says which and how to install it.
    """
    flashinfer = load_module("flashinfer")
    for name in ("activation", "norm", "page", "rope", "sampling"):
        load_module(f"flashinfer.{name}")
    return Wheels(flashinfer=flashinfer, sgl_kernel=load_module("sgl_kernel"))


def load_module(name: str) -> ModuleType:
    """A module of a wheel that the package does not load by itself.

    Raises:
        StartupError: as ``load_wheels``.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise StartupError(
            f"--device cuda: cannot import {name}: {error}. Install a kernel line, `pip install 'sglang-lite[cuda]'` "
            "(CUDA 13) or `pip install 'sglang-lite[cuda12]'`, then run `sglang-lite check-env` for what is wrong"
        ) from error
