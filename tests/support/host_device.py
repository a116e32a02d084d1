"""The accelerator interface on the host: what a device does late happens at once, graphs replay recorded tensors.

Order mistakes do not show as wrong numbers here, so the stand-in keeps account of them: events that are waited for
without having been recorded, streams entered while another is current, pinned memory written while a copy from it
could still be queued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_lite.execution.device import DeviceMemory, Event, Graph
from tests.support.kernel_doubles.capture import Recording


class HostEvent:
    """Remembers on which stream it was last recorded and what waited for it."""

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self.num_records = 0
        self.num_synchronized = 0

    def record(self) -> None:
        self._device.require_active("an event was recorded")
        self._device.log.append(f"record on {self._device.stream}")
        self.num_records += 1

    def wait(self) -> None:
        self._device.require_active("a stream waited for an event")
        if not self.num_records:
            raise RuntimeError("a stream waits for an event that nothing was queued before")
        self._device.log.append(f"wait on {self._device.stream}")

    def synchronize(self) -> None:
        self.num_synchronized += 1


class HostDevice:
    """See ``sglang_lite.execution.device.Device``.

    Attributes:
        stream: current stream: None outside ``activate``, ``compute`` or ``prefill``.
        log: what happened to streams and events.
        uploads, captures: how many there were.
    """

    def __init__(self, total_memory: int = 8 << 30, free_memory: int = 6 << 30) -> None:
        self.stream: str | None = None
        self.log: list[str] = []
        self.uploads = 0
        self.captures = 0
        self._memory = DeviceMemory(total_memory, free_memory)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @contextmanager
    def activate(self) -> Iterator[None]:
        before, self.stream = self.stream, "compute"
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def second_stream(self) -> Iterator[None]:
        self.require_active("the second stream was entered")
        before, self.stream = self.stream, "prefill"
        try:
            yield
        finally:
            self.stream = before

    def event(self) -> Event:
        return HostEvent(self)

    def pinned(self, length: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(length, dtype=dtype)

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        self.require_active("a host array was uploaded")
        self.uploads += 1
        return torch.from_numpy(np.array(array))

    def share(self, tensor: Tensor) -> None:
        self.log.append(f"share with {self.stream}")

    def capture(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        self.require_active("a graph was captured")
        self.captures += 1
        with Recording() as recording:
            result = run()
        # Capturing runs nothing: what it left in memory must not matter.
        result.fill_(torch.nan)
        return recording, result

    def memory(self) -> DeviceMemory:
        return self._memory

    def synchronize(self) -> None:
        pass

    def require_active(self, what: str) -> None:
        if self.stream is None:
            raise RuntimeError(f"{what} outside the device's streams")
