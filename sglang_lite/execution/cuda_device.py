"""The accelerator interface over torch.cuda."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_lite.execution.device import DeviceMemory, Event, Graph


class CudaDevice:
    """See ``execution.device.Device``.

    Args:
        ordinal: of the CUDA device, among those visible to the process.
    """

    def __init__(self, ordinal: int) -> None:
        self._device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self._device)
        self._compute: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._prefill: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._graph_pool = torch.cuda.graph_pool_handle()

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Device and compute stream, for the calling thread."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._compute):
            yield

    @contextmanager
    def second_stream(self) -> Iterator[None]:
        """The stream of prefill."""
        with torch.cuda.stream(self._prefill):
            yield

    def event(self) -> Event:
        """Without timing, and blocking: a thread that waits leaves the processor to others."""
        return _CudaEvent()

    def pinned(self, length: int, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory."""
        return torch.empty(length, dtype=dtype, pin_memory=True)

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Through page-locked memory, which torch keeps until the copy has run."""
        return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(self._device, non_blocking=True)

    def share(self, tensor: Tensor) -> None:
        """Keep the memory until the current stream is done with it."""
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def capture(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """On the compute stream, with the memory pool that all graphs of the device share."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=self._compute):
            result = run()
        return graph, result

    def memory(self) -> DeviceMemory:
        """As the driver counts it, other processes included; blocks that torch keeps for reuse are given back first."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(total=total, free=free)

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self._device)


class _CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """On the current stream."""
        self._event.record()

    def wait(self) -> None:
        """On the current stream."""
        self._event.wait()

    def synchronize(self) -> None:
        """On the host."""
        self._event.synchronize()
