"""Recording of torch operations and kernel calls on fixed tensors, and their replay: what a CUDA graph does.

A recording keeps the tensors that the operations read and wrote. A replay runs the same operations on the same
memory; Python does not run again, so a value that Python took from somewhere while recording stays as it was.
Reading a tensor's value from Python while recording is refused, as it is on a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Function = TypeVar("Function", bound=Callable[..., Any])

_HOST_READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.masked_select", "aten.unique")
_HOST_METHODS = ("tolist", "numpy", "cpu")
_ACTIVE: list[Recording] = []


class CaptureError(RuntimeError):
    """Something that a captured graph cannot contain."""


class Recording(TorchDispatchMode):
    """Use as a context manager to record; ``replay`` afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __enter__(self) -> Recording:
        _ACTIVE.append(self)
        self._in_kernel = False
        self._readers = {name: getattr(Tensor, name) for name in _HOST_METHODS}
        for name, reader in self._readers.items():
            setattr(Tensor, name, self._refusing(name, reader))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for name, reader in self._readers.items():
            setattr(Tensor, name, reader)
        _ACTIVE.remove(self)

    def _refusing(self, name: str, reader: Callable[..., Any]) -> Callable[..., Any]:
        """On the host these read memory without a word to the dispatcher."""

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._in_kernel:
                raise CaptureError(f"Tensor.{name} reads values on the host inside a captured graph")
            return reader(tensor, *args, **kwargs)

        return read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(_HOST_READS):
            raise CaptureError(f"{func} reads a value on the host inside a captured graph")
        result = func(*args, **(kwargs or {}))
        self._entries.append((func, args, kwargs or {}, result))
        return result

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel as one entry: what it does inside is the device's business."""
        self._in_kernel = True
        with _disable_current_modes():
            result = function(*args, **kwargs)
        self._in_kernel = False
        self._entries.append((function, args, kwargs, result))
        return result

    def replay(self) -> None:
        """Run everything again on the recorded memory."""
        with torch.inference_mode():
            for function, args, kwargs, recorded in self._entries:
                _copy_into(recorded, function(*args, **kwargs))


def _copy_into(recorded: Any, result: Any) -> None:
    if isinstance(recorded, Tensor):
        if recorded.data_ptr() != result.data_ptr():  # a new tensor; views and results in place are there already
            recorded.copy_(result)
    elif isinstance(recorded, list | tuple):
        for old, new in zip(recorded, result, strict=True):
            _copy_into(old, new)


def is_recording() -> bool:
    """Whether a graph is being captured."""
    return bool(_ACTIVE)


def kernel(function: Function) -> Function:
    """Mark a double as one launch."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _ACTIVE[-1].call(function, args, kwargs) if _ACTIVE else function(*args, **kwargs)

    return call  # type: ignore[return-value]


def host_only(name: str) -> None:
    """Refuse host work while a graph is captured."""
    if _ACTIVE:
        raise CaptureError(f"{name} is host work with copies to the device: it cannot be captured")
