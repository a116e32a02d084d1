"""What execution needs of an accelerator beside tensors: streams, events, pinned memory, graphs.

``cuda_device`` implements it over torch.cuda; tests drive the same runner with a stand-in on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of the device: all of it, and what nobody uses."""

    total: int
    free: int


class Event(Protocol):
    """A point in a stream's work."""

    def record(self) -> None:
        """Move the point behind what is queued on the current stream."""

    def wait(self) -> None:
        """Let the current stream wait for the point; the host does not."""

    def synchronize(self) -> None:
        """Let the host wait for the point. Returns at once when it was never recorded."""


class Graph(Protocol):
    """Captured launches."""

    def replay(self) -> None:
        """Queue all of them on the current stream."""


class Device(Protocol):
    """One accelerator. See ``streams`` for who may use which stream."""

    @property
    def torch_device(self) -> torch.device: ...

    def activate(self) -> AbstractContextManager[object]:
        """Make the device and its compute stream current for the calling thread."""

    def second_stream(self) -> AbstractContextManager[object]:
        """Make the stream of prefill current, for steps whose two parts run side by side."""

    def event(self) -> Event:
        """A new event, not recorded."""

    def pinned(self, length: int, dtype: torch.dtype) -> Tensor:
        """Host memory [length] that the device copies from and to while the host goes on."""

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        """A copy of a host array on the device, queued on the current stream; the array may change afterwards."""

    def share(self, tensor: Tensor) -> None:
        """Tell the allocator that the current stream uses a tensor that another stream allocated."""

    def capture(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Record what ``run`` launches, without running it; also the tensor it returned, whose memory replays write.

        Graphs of one device share memory for what lies between: only one of them may run at a time, and a result is
        valid until the next replay of any graph is queued.
        """

    def memory(self) -> DeviceMemory:
        """Of the device, now."""

    def synchronize(self) -> None:
        """Wait for everything that is queued."""
