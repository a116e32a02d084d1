"""Replacing weights and recording profiles, between the plans of a running core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from sglang_lite.engine.frames import MaintenanceCommand
from sglang_lite.engine.messages import PauseMode, StartProfile, StopProfile, UpdateWeights
from sglang_lite.execution.base import Executor, MaintainedExecutor, WrongMomentError
from sglang_lite.scheduler.scheduler import Scheduler
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

Answer = Callable[[MaintenanceCommand, bool, str, bool], None]
"""Takes a command, whether it was done, what to say about it, and whether it only came at the wrong moment."""


@dataclass(slots=True)
class _Reload:
    """Weights that are being loaded. ``paused`` is the pause that holds afterwards."""

    command: UpdateWeights
    done: Future[str]
    paused: PauseMode | None


class Maintenance:
    """Carries out what needs the executor between two plans and takes longer than a turn of the loop.

    While weights are loaded the scheduler is paused: requests that come meanwhile wait, and none of them sees a prefix
    that the old weights computed.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, answer: Answer) -> None:
        self._scheduler = scheduler
        self._executor = executor if isinstance(executor, MaintainedExecutor) else None
        self._answer = answer
        self._updates: list[UpdateWeights] = []
        self._reload: _Reload | None = None
        self._profiles: list[tuple[MaintenanceCommand, Future[str]]] = []

    @property
    def pending(self) -> bool:
        """Whether something waits for its end."""
        return bool(self._updates or self._profiles or self._reload)

    def begin(self, command: MaintenanceCommand) -> None:
        """Take a command; its answer may come at once or from a later ``advance``."""
        if self._executor is None:
            self._answer(command, False, "this engine can neither replace weights nor record its steps", False)
        elif isinstance(command, StartProfile):
            self._profiles.append((command, self._executor.start_profile(command.options)))
        elif isinstance(command, StopProfile):
            self._profiles.append((command, self._executor.stop_profile()))
        else:
            self._updates.append(command)

    def pause(self, mode: PauseMode, now: float) -> None:
        """A front pauses the scheduler."""
        if self._reload is not None:
            self._reload.paused = mode
        self._scheduler.pause(mode, now)

    def resume(self) -> None:
        """A front ends a pause."""
        if self._reload is not None:
            self._reload.paused = None
        else:
            self._scheduler.resume()

    def advance(self, in_flight: bool, now: float) -> None:
        """Start and finish what can be, once a turn."""
        for command, done in self._profiles[:]:
            if done.done():
                self._profiles.remove((command, done))
                self._report(command, done)
        if self._reload is not None:
            if not self._reload.done.done():
                return
            self._end_reload(self._reload, now)
        if self._updates:
            self._start_reloads(in_flight, now)

    def _start_reloads(self, in_flight: bool, now: float) -> None:
        stats = self._scheduler.stats()
        busy = stats.num_running + stats.num_waiting
        if busy:
            for command in self._updates:
                self._answer(command, False, f"the engine is busy with {busy} requests; abort them or wait", True)
            self._updates.clear()
        elif not in_flight and self._executor is not None:
            command = self._updates.pop(0)
            paused = next((mode for mode in _MODES if mode == stats.paused), None)
            self._scheduler.pause("retract", now)
            self._reload = _Reload(command, self._executor.load_weights(command.path), paused)

    def _end_reload(self, reload: _Reload, now: float) -> None:
        self._reload = None
        if reload.done.exception() is None and not self._scheduler.flush():
            # Its pages hold what the old weights made of their tokens.
            raise RuntimeError("the prefix cache could not be emptied after new weights were loaded")
        self._scheduler.resume()
        if reload.paused is not None:
            self._scheduler.pause(reload.paused, now)
        self._report(reload.command, reload.done)

    def _report(self, command: MaintenanceCommand, done: Future[str]) -> None:
        error = done.exception()
        if error is not None and not isinstance(error, StartupError):
            logger.error("%s failed", type(command).__name__, exc_info=error)
        moment = isinstance(error, WrongMomentError)
        self._answer(command, error is None, str(error) if error is not None else done.result() or "", moment)


_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")
