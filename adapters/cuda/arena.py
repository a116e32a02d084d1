"""The small integers of a step, packed so that one copy brings them to the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.types import Int32Array

SECTION_ALIGNMENT = 4
"""Sections start at multiples of this many int32 elements: 16 bytes, the widest load of the kernels."""


@dataclass(frozen=True, slots=True)
class Section:
    """The same integers on both sides.

    Attributes:
        array: int32[n], host memory to write into.
        host: the same memory as a tensor.
        device: int32[n] on the device, valid once the arena was uploaded.
    """

    array: Int32Array
    host: Tensor
    device: Tensor


class StepArena:
    """Two int32 buffers of one layout. The order and lengths of ``reserve`` calls alone decide where a section lies,
    so that a captured graph finds its inputs where they were when it was captured.

    Args:
        host: int32[capacity], pinned where the device copies asynchronously.
        device: int32[capacity] on the device.
    """

    def __init__(self, host: Tensor, device: Tensor) -> None:
        if host.dtype != torch.int32 or device.dtype != torch.int32 or host.shape != device.shape:
            raise OperationInputError(
                f"step arena: both buffers must be int32 of one length, got {host.dtype}{list(host.shape)} and "
                f"{device.dtype}{list(device.shape)}"
            )
        self._host = host
        self._array: Int32Array = host.numpy()
        self._device = device
        self._used = 0

    @property
    def capacity(self) -> int:
        """Elements that fit."""
        return self._host.shape[0]

    def reserve(self, length: int) -> Section:
        """The next ``length`` elements.

        Raises:
            OperationInputError: they do not fit; the step is larger than the arena was made for.
        """
        start = self._used
        stop = start + length
        if stop > self.capacity:
            raise OperationInputError(
                f"step arena: {stop} integers are needed and {self.capacity} fit; the step has more tokens, rows or "
                "pages than the arena was sized for"
            )
        self._used = min(-(-stop // SECTION_ALIGNMENT) * SECTION_ALIGNMENT, self.capacity)
        return Section(self._array[start:stop], self._host[start:stop], self._device[start:stop])

    def rewind(self, host: Tensor | None = None) -> None:
        """Start a new step, over the next host buffer where there are several in turn."""
        self._used = 0
        if host is not None:
            self._host = host
            self._array = host.numpy()

    def upload(self) -> None:
        """Copy what was reserved to the device, on the current stream, in one transfer."""
        used = self._used
        self._device[:used].copy_(self._host[:used], non_blocking=True)


def arena_of(length: int, device: torch.device) -> StepArena:
    """An arena in ordinary memory, for steps planned one at a time."""
    return StepArena(torch.empty(length, dtype=torch.int32), torch.empty(length, dtype=torch.int32, device=device))
