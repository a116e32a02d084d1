"""Replacing weights and recording profiles, between the plans of a running core."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from sglang_lite.engine.frames import MaintenanceCommand
from sglang_lite.engine.messages import (
    MemoryTag,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
    UpdateWeights,
)
from sglang_lite.execution.base import Executor, MaintainedExecutor, WrongMomentError
from sglang_lite.scheduler.scheduler import Scheduler
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

Answer = Callable[[MaintenanceCommand, bool, str, bool], None]
"""Takes a command, whether it was done, what to say about it, and whether it only came at the wrong moment."""


MemoryCommand = ReleaseMemory | ResumeMemory


@dataclass(slots=True)
class _Change:
    """What the executor is doing to weights or memory."""

    command: UpdateWeights | MemoryCommand
    done: Future[str]


class Maintenance:
    """Carries out what needs the executor between two plans and takes longer than a turn of the loop.

    While weights are loaded, and until all memory is back, the scheduler is paused: requests that come meanwhile wait,
    and none of them sees a prefix that the old weights computed.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, answer: Answer) -> None:
        self._scheduler = scheduler
        self._executor = executor if isinstance(executor, MaintainedExecutor) else None
        self._answer = answer
        self._waiting: deque[UpdateWeights | MemoryCommand] = deque()
        self._change: _Change | None = None
        self._released: set[MemoryTag] = set()
        self._paused: PauseMode | None = None
        self._profiles: list[tuple[MaintenanceCommand, Future[str]]] = []

    @property
    def pending(self) -> bool:
        """Whether something waits for its end."""
        return bool(self._waiting or self._profiles or self._change)

    @property
    def _holds(self) -> bool:
        """Whether the scheduler is paused for what happens here; ``_paused`` is then the pause behind that."""
        return self._change is not None or bool(self._released)

    def begin(self, command: MaintenanceCommand) -> None:
        """Take a command; its answer may come at once or from a later ``advance``."""
        if self._executor is None:
            self._answer(command, False, "this engine can neither replace weights nor record its steps", False)
        elif isinstance(command, StartProfile):
            self._profiles.append((command, self._executor.start_profile(command.options)))
        elif isinstance(command, StopProfile):
            self._profiles.append((command, self._executor.stop_profile()))
        else:
            self._waiting.append(command)

    def pause(self, mode: PauseMode, now: float) -> None:
        """A front pauses the scheduler."""
        if self._holds:
            self._paused = mode
        self._scheduler.pause(mode, now)

    def resume(self) -> None:
        """A front ends a pause."""
        if self._holds:
            self._paused = None
        else:
            self._scheduler.resume()

    def advance(self, in_flight: bool, now: float) -> None:
        """Start and finish what can be, once a turn."""
        for command, done in self._profiles[:]:
            if done.done():
                self._profiles.remove((command, done))
                self._report(command, done)
        if self._change is not None:
            if not self._change.done.done():
                return
            self._end(self._change, now)
        if self._waiting and self._executor is not None:
            self._start(self._executor, in_flight, now)

    def _start(self, executor: MaintainedExecutor, in_flight: bool, now: float) -> None:
        command = self._waiting[0]
        tags: set[MemoryTag] = set()
        if isinstance(command, ReleaseMemory):
            tags = set(command.tags) - self._released
        elif isinstance(command, ResumeMemory):
            tags = set(command.tags) & self._released
        if not isinstance(command, UpdateWeights) and not tags:
            self._answer(self._waiting.popleft(), True, "", False)
        elif (reason := self._reason_against(command)) is not None:
            self._answer(self._waiting.popleft(), False, reason, True)
        elif not in_flight:
            self._waiting.popleft()
            self._hold(now)
            if isinstance(command, UpdateWeights):
                done = executor.load_weights(command.path)
            elif isinstance(command, ReleaseMemory):
                self._flush("its memory can be given back")
                done = executor.release_memory(tags)
            else:
                done = executor.resume_memory(tags)
            self._change = _Change(command, done)

    def _reason_against(self, command: UpdateWeights | MemoryCommand) -> str | None:
        """Why a command cannot be carried out now."""
        if isinstance(command, ResumeMemory):
            return None
        if isinstance(command, UpdateWeights) and "weights" in self._released:
            return "the weights are released; resume them first"
        stats = self._scheduler.stats()
        # Requests that a pause has retracted hold no pages, and compute everything again.
        is_retracted = isinstance(command, ReleaseMemory) and stats.paused == "retract"
        busy = stats.num_running + stats.num_lent + (0 if is_retracted else stats.num_waiting)
        return f"the engine is busy with {busy} requests; abort them or wait" if busy else None

    def _hold(self, now: float) -> None:
        if not self._holds:
            stats = self._scheduler.stats()
            self._paused = next((mode for mode in _MODES if mode == stats.paused), None)
        self._scheduler.pause("retract", now)

    def _end(self, change: _Change, now: float) -> None:
        self._change = None
        command, failed = change.command, change.done.exception() is not None
        if isinstance(command, UpdateWeights):
            if not failed:
                self._flush("new weights were loaded")  # its pages hold what the old weights made of their tokens
        elif not failed and isinstance(command, ReleaseMemory):
            self._released |= set(command.tags)
        elif not failed:
            self._released -= set(command.tags)
        if not self._holds:
            self._scheduler.resume()
            if self._paused is not None:
                self._scheduler.pause(self._paused, now)
        self._report(command, change.done)

    def _flush(self, occasion: str) -> None:
        if not self._scheduler.flush():
            raise RuntimeError(f"the prefix cache could not be emptied so that {occasion}")

    def _report(self, command: MaintenanceCommand, done: Future[str]) -> None:
        error = done.exception()
        if error is not None and not isinstance(error, StartupError):
            logger.error("%s failed", type(command).__name__, exc_info=error)
        moment = isinstance(error, WrongMomentError)
        self._answer(command, error is None, str(error) if error is not None else done.result() or "", moment)


_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")
