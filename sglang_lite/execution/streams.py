"""The stream discipline of the device path, in one place, and the host buffers it protects.

* One compute stream, in order: copies of a step's inputs to the device, the kernels' plan data, the forward pass,
  sampling, and the copy of the sampled tokens back. Memory on the device is therefore never overwritten before its
  last reader ran, without a second copy of anything.
* The host runs ahead of the device by one step. What it must not do is change host memory that a queued copy has yet
  to read. Inputs are written into buffers that take turns (``HostRing``), each guarded by an event recorded behind its
  copy. The attention wrappers own one host buffer each for their plan, so a step is planned only once the copies of
  the step before have run: they stand at the front of that step, so this waits for nothing but the forward pass before
  it, which the engine has collected by then.
* Sampled tokens are copied into pinned memory of their own, and whoever collects the step waits for the event behind
  the copy (``PendingStep``). The next step reads them on the device and waits for nothing.
* A second stream exists for steps with both decode rows and prefill chunks (``--enable-pd-multiplexing``): it starts
  behind the inputs' copy and ends before sampling. It has workspaces of its own; the two parts write different pages.
* Graphs are captured and replayed on the compute stream only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sglang_lite.execution.device import Device, Event
from sglang_lite.scheduler.plan import ScoredPositions, StepOutput


class HostRing:
    """Pinned int32 buffers that take turns.

    Args:
        length: elements of each.
        count: how many; with 2 the host fills one while the device reads the other.
    """

    def __init__(self, device: Device, length: int, count: int = 2) -> None:
        self._buffers = [device.pinned(length, torch.int32) for _ in range(count)]
        self._events = [device.event() for _ in range(count)]
        self._turn = 0

    def take(self) -> Tensor:
        """The next buffer, once the device has read what was in it."""
        self._turn = (self._turn + 1) % len(self._buffers)
        self._events[self._turn].synchronize()
        return self._buffers[self._turn]

    def queued(self) -> None:
        """The copies of the current buffer are queued."""
        self._events[self._turn].record()


class PlanGate:
    """Keeps the host from planning a step before the plan data of the one before has left for the device."""

    def __init__(self, device: Device) -> None:
        self._event = device.event()

    def enter(self) -> None:
        """Wait until plans may be written."""
        self._event.synchronize()

    def leave(self) -> None:
        """The copies of the plans are queued on the current stream."""
        self._event.record()


class LaunchedStep(Protocol):
    """What a launch returns."""

    @property
    def step(self) -> int:
        """Number of the plan."""

    def result(self) -> StepOutput:
        """Wait for the device. Call it once."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step whose result had to be waited for while it was launched."""

    output: StepOutput

    @property
    def step(self) -> int:
        """Number of the plan."""
        return self.output.step

    def result(self) -> StepOutput:
        """At once."""
        return self.output


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose work is queued.

    Attributes:
        step: number of the plan.
        tokens: int32, pinned, of which the first ``num_tokens`` are the step's once ``done`` is reached.
        done: behind the copy of the tokens.
        scored: log-probabilities, already on the host.
        release: gives the memory of ``tokens`` back.
    """

    step: int
    tokens: Tensor
    num_tokens: int
    done: Event
    scored: list[ScoredPositions]
    release: Callable[[Tensor], None]

    def result(self) -> StepOutput:
        """Wait for the device. Call it once."""
        self.done.synchronize()
        tokens = self.tokens[: self.num_tokens].numpy().copy()
        self.release(self.tokens)
        return StepOutput(self.step, tokens, self.scored)


class TokenBuffers:
    """Pinned memory for sampled tokens, as much as steps are uncollected."""

    def __init__(self, device: Device, num_rows: int) -> None:
        self._device = device
        self._num_rows = num_rows
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """int32[num_rows]."""
        # Appending and popping are atomic: one thread takes, another gives back.
        return self._free.pop() if self._free else self._device.pinned(self._num_rows, torch.int32)

    def give_back(self, buffer: Tensor) -> None:
        """Its tokens were read."""
        self._free.append(buffer)
