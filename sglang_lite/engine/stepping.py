"""A core of this process, which the threads that wait for results step themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from sglang_lite.engine.core import EngineCore
from sglang_lite.engine.frames import ControlEvent, Keys
from sglang_lite.engine.local import LocalTransport, WatchingTransport
from sglang_lite.engine.messages import (
    Abort,
    Finish,
    Flush,
    Load,
    LoadAdapter,
    LoadGrammar,
    QueryLoad,
    Reply,
    UnloadAdapter,
)
from sglang_lite.engine.parts import CoreParts
from sglang_lite.engine.roles import Role
from sglang_lite.frontend.output import OutputProcessor, SequenceState
from sglang_lite.types import OutputColumns, RequestError

WAIT_SECONDS = 0.05
"""Longest wait of one turn while requests are there but none can be planned yet."""


class SteppedCore:
    """Whoever steps does so for all threads that wait, and their requests run in one batch.

    Args:
        processor: takes what the core produces.

    Attributes:
        core, transport: the core, and what it gets commands from.
        news: keys of sequences that have changed; whoever looks at one takes it out.
        closed: it is not stepped any more.
    """

    def __init__(self, parts: CoreParts, role: Role | None, processor: OutputProcessor) -> None:
        self._processor = processor
        self._replies: dict[int, Reply | Load] = {}
        self._stepping = threading.Lock()
        callbacks = self._take_output, self._take_event
        self.transport = (
            LocalTransport(*callbacks) if role is None else WatchingTransport(*callbacks, watched=role.fileno())
        )
        self.core = EngineCore(
            parts.scheduler, parts.executor, self.transport, depth=parts.depth, grammars=parts.grammars, role=role
        )
        self.news: set[int] = set()
        self.closed = False

    def check_open(self) -> None:
        """Return when the core can be used.

        Raises:
            RequestError: 503, it was closed.
        """
        if self.closed:
            raise RequestError("the engine was shut down; make a new one", status=503)

    def turn(self, waiting_for: Sequence[SequenceState]) -> None:
        """One turn of the core, unless another thread has just finished what this one waits for."""
        with self._stepping:
            self.check_open()
            if all(state.finish_reason is not None for state in waiting_for):
                return
            patience = self.core.patience()
            self.core.step(WAIT_SECONDS if patience is None else min(patience, WAIT_SECONDS))

    def ask(self, command: Flush | QueryLoad | LoadAdapter | UnloadAdapter | LoadGrammar) -> Reply | Load:
        """The answer to a command."""
        self.check_open()
        self.transport.put(command)
        with self._stepping:
            while command.call not in self._replies:
                self.core.step(min(self.core.patience() or 0.0, WAIT_SECONDS))
        return self._replies.pop(command.call)

    def give_up(self, keys: Sequence[int], forget: Callable[[], None]) -> None:
        """Abort these sequences, those of them that run; ``forget`` is called before the core hears of it.

        What ``forget`` gives back may be asked for at once: whoever does so sends that behind the abort.
        """
        if keys and not self.closed:
            self.transport.put(Keys(Abort(0, 0), np.array(keys, np.int64)))
        forget()
        if keys and not self.closed:
            with self._stepping:
                self.core.step(0.0)

    def close(self, end: Callable[[], None]) -> None:
        """Step no more, and call ``end`` the first time."""
        with self._stepping:
            if not self.closed:
                self.closed = True
                end()

    def _take_event(self, event: ControlEvent) -> None:
        if isinstance(event, (Reply, Load)) and event.call:
            self._replies[event.call] = event

    def _take_output(self, columns: OutputColumns) -> None:
        """Called by the core within ``step``."""
        processed = self._processor.process(columns, time.time())
        self.news.update(state.key for state in processed.changed)
        if processed.finish_keys:
            self.transport.put(Keys(Finish(), np.array(processed.finish_keys, np.int64)))
