"""The engine core: one loop that turns request frames into plans, runs them and sends what they produced."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import assert_never

import msgspec

from sglang_lite.engine.frames import Command, Keys, MaintenanceCommand
from sglang_lite.engine.grammars import GrammarLibrary
from sglang_lite.engine.kv_publisher import KVEventPublisher
from sglang_lite.engine.load import LoadMeter
from sglang_lite.engine.maintenance import Maintenance
from sglang_lite.engine.messages import (
    Abort,
    AbortAll,
    Flush,
    Load,
    LoadAdapter,
    LoadGrammar,
    Pause,
    Ping,
    QueryLoad,
    ReleaseMemory,
    Reply,
    Resume,
    ResumeMemory,
    Shutdown,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
)
from sglang_lite.engine.roles import Role
from sglang_lite.engine.transport import Transport
from sglang_lite.execution.base import AdaptingExecutor, ExecutionError, Executor, InterruptibleExecutor
from sglang_lite.grammar.thinking import behind_thinking
from sglang_lite.scheduler.scheduler import Scheduler
from sglang_lite.types import OutputColumns, RequestColumns, RequestFlags, StartupError

logger = logging.getLogger(__name__)

MAINTENANCE_PAGES = 256
"""Pages reclaimed in one slice of maintenance: some tens of microseconds, hidden behind a running step."""

STALLED_WAIT = 0.02
"""Longest wait in seconds when requests are there but none can be planned; bounds the wake-ups of a stalled engine."""

CONTROL_INTERVAL = 0.05
"""Seconds between two looks for messages while a step runs."""

SHORTEST_WAIT = 0.001
"""A wait with nothing to do is never shorter, whatever the deadlines say: the loop must not spin."""


@dataclass(slots=True)
class _PendingFlush:
    """A flush that waits for the engine to run dry, at most until ``deadline`` (seconds of the core's clock)."""

    command: Flush
    deadline: float


class EngineCore:
    """Drives a scheduler and an executor.

    Args:
        depth: plans in flight at once: 2 overlaps planning with execution, 1 does not.
        clock: monotonic time in seconds; the only clock the scheduler ever sees.
        grammars: those of the requests; None when it serves none.
        kv_events: gets what the scheduler records, when it records KV events.
        role: of its server under prefill/decode disaggregation, None when it serves both.

    Attributes:
        turn_started: when the running turn of the loop began, None while it waits for messages; another thread may
            watch it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        transport: Transport,
        *,
        depth: int = 2,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarLibrary | None = None,
        kv_events: KVEventPublisher | None = None,
        role: Role | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._adapting = executor if isinstance(executor, AdaptingExecutor) else None
        self._interruptible = executor if isinstance(executor, InterruptibleExecutor) else None
        self._transport = transport
        self._depth = depth
        self._clock = clock
        self._grammars = grammars
        self._kv_events = kv_events
        self._role = role
        self._submitted: deque[int] = deque()
        self._flushes: list[_PendingFlush] = []
        self._adapter_changes: list[tuple[LoadAdapter | UnloadAdapter | LoadGrammar, Future[None]]] = []
        self._pauses: list[Pause] = []
        self._maintenance = Maintenance(scheduler, executor, self._answer)
        self._meter = LoadMeter(clock(), scheduler.config.max_running_requests)
        self._busy = False
        self._running = True
        self.turn_started: float | None = None

    def run(self) -> None:
        """Serve until a ``Shutdown`` arrives. An exception that leaves this method is a fault of the engine."""
        while self._running:
            self.step(self.patience())

    def step(self, patience: float | None) -> None:
        """One turn of the loop: receive, plan ahead, then finish the oldest plan and send its frame.

        Args:
            patience: how long to wait for a message, in seconds; None for ever.
        """
        for command in self._receive(patience):
            self._handle(command)
        if self._role is not None:
            self._take_turn(self._role)
        self._busy = self._plan_ahead()
        self._send(self._scheduler.drain_outputs())
        self._busy |= self._scheduler.maintain(MAINTENANCE_PAGES) > 0
        if self._submitted:
            self._serve_controls()
            if self._running:
                self._send(self._finish_oldest())
            self._busy = True
        if self._pauses and not self._submitted:
            self._confirm_pauses()
        if self._flushes:
            self._try_flushes()
        if self._adapter_changes:
            self._confirm_adapters()
        if self._maintenance.pending:
            self._maintenance.advance(bool(self._submitted), self._clock())
        if self._kv_events is not None:
            self._kv_events.take(self._scheduler.drain_kv_events())
        if self._meter.due(self._clock()):
            self._transport.send(self._measure(call=0))

    @property
    def busy(self) -> bool:
        """The last turn did something, so the next one may have more to do."""
        return self._busy

    def _plan_ahead(self) -> bool:
        """Submit plans until ``depth`` are in flight; whether there was one."""
        planned = False
        while len(self._submitted) < self._depth:
            plan = self._scheduler.plan(self._clock())
            if plan is None:
                break
            self._executor.submit(plan)
            self._submitted.append(plan.step)
            planned = True
        return planned

    def _finish_oldest(self) -> OutputColumns:
        """Wait for the oldest plan and commit it; a failed pass ends the requests of that plan only."""
        step = self._submitted[0]
        try:
            output = self._executor.collect()
        except ExecutionError as error:
            logger.error("step %d failed: %s", step, error)
            columns = self._scheduler.fail(step, str(error), self._clock())
        else:
            columns = self._scheduler.commit(output, self._clock())
        # Taken off last: an interrupt while waiting leaves the step where the next turn finds it.
        self._submitted.popleft()
        self._meter.steps += 1
        self._meter.worked()
        return columns

    def _serve_controls(self) -> None:
        """Until the oldest plan is done, answer the fronts: a step on a slow machine may take seconds."""
        if self._interruptible is None:
            return
        while self._running and not self._interruptible.wait(CONTROL_INTERVAL):
            for command in self._transport.receive(0):
                self._handle(command)
            self._send(self._scheduler.drain_outputs())
            if self._flushes:
                self._try_flushes()

    def patience(self) -> float | None:
        """Seconds that the next turn may wait for a message: 0 while busy, None when only a message can help."""
        if self._busy:
            return 0.0
        now = self._clock()
        moments = [flush.deadline for flush in self._flushes]
        moments += [moment for moment in (self._scheduler.next_deadline(), self._meter.next_due) if moment is not None]
        if self._scheduler.has_work or self._flushes or self._adapter_changes or self._maintenance.pending:
            moments.append(now + STALLED_WAIT)
        return max(SHORTEST_WAIT, min(moments) - now) if moments else None

    def _receive(self, patience: float | None) -> list[Command]:
        started = self.turn_started = self._clock()
        if patience == 0:
            return self._transport.receive(0)
        self.turn_started = None
        commands = self._transport.receive(patience)
        self.turn_started = self._clock()
        self._meter.idle_seconds += self.turn_started - started
        return commands

    def _handle(self, command: Command) -> None:
        """Do what a front asked for. Replies go to the front that asked."""
        now = self._clock()
        match command:
            case RequestColumns():
                self._admit(command, now)
                self._meter.worked()
            case Keys(header=Abort() as header, keys=keys):
                self._reply(header, count=self._scheduler.abort(keys, now) + self._give_up(keys.tolist()))
            case Keys(keys=keys):
                self._scheduler.finish(keys, now)
            case AbortAll():
                self._reply(command, count=self._scheduler.abort_all(now) + self._give_up(None))
            case Flush():
                self._flushes.append(_PendingFlush(command, now + max(command.timeout, 0.0)))
            case Pause():
                self._maintenance.pause(command.mode, now)
                if command.mode == "abort":
                    self._give_up(None)
                self._pauses.append(command)
            case Resume():
                self._confirm_pauses()
                self._maintenance.resume()
                self._reply(command)
            case QueryLoad():
                self._transport.send(self._measure(command.call), command.front)
            case Ping():
                self._reply(command)
            case LoadAdapter() | UnloadAdapter():
                self._change_adapter(command)
            case LoadGrammar():
                self._load_grammar(command)
            case UpdateWeights() | ReleaseMemory() | ResumeMemory() | StartProfile() | StopProfile():
                self._maintenance.begin(command)
            case Shutdown():
                self._running = False
            case _:
                assert_never(command)

    def _admit(self, columns: RequestColumns, now: float) -> None:
        """Admit requests; those with a grammar get a matcher of it."""
        matchers, missing, unfit = {}, [], []
        for index, extras in columns.extras.items():
            if not extras.grammar:
                continue
            matcher = None if self._grammars is None else self._grammars.matcher(extras.grammar)
            if matcher is None:
                missing.append(int(columns.key[index]))
                continue
            matchers[index] = behind_thinking(matcher, extras.thinking)
            if extras.num_resumed and not all(map(matchers[index].accept, columns.resumed(index))):
                unfit.append(int(columns.key[index]))
        if self._role is not None:
            self._role.admitting(columns)
        self._scheduler.admit(columns, now, matchers)
        if missing:
            self._scheduler.reject(missing, "the engine does not have the request's grammar any more; send it again")
        if unfit:
            self._scheduler.reject(unfit, "resume_from holds tokens that the request's grammar does not allow")
        refused = columns.key[(columns.flags & int(RequestFlags.REFUSED)) != 0].tolist()
        if refused:
            self._scheduler.reject(refused, "refused")
        if self._role is not None:
            self._role.admitted(columns)

    def _give_up(self, keys: list[int] | None) -> int:
        """Requests that the scheduler has done its part of; None for all."""
        return 0 if self._role is None else self._role.abort(keys)

    def _take_turn(self, role: Role) -> None:
        """Let the role act on what happened since the last turn."""
        role.turn(self._clock())
        for columns in role.take_outputs():
            self._meter.worked()
            self._transport.send_output(columns)

    def _load_grammar(self, command: LoadGrammar) -> None:
        if self._grammars is None:
            self._reply(command, ok=False, message="this engine takes no grammars")
        else:
            self._adapter_changes.append((command, self._grammars.load(command.identity, command.compiled)))

    def _change_adapter(self, command: LoadAdapter | UnloadAdapter) -> None:
        """Start loading or unloading; the answer follows when it is done."""
        if self._adapting is None:
            self._reply(command, ok=False, message="this engine takes no adapters")
        elif isinstance(command, LoadAdapter):
            self._adapter_changes.append((command, self._adapting.load_adapter(command.slot, command.path)))
        else:
            self._adapter_changes.append((command, self._adapting.unload_adapter(command.slot)))

    def _confirm_adapters(self) -> None:
        """Answer the changes of adapters, and the grammars, that are done."""
        pending = []
        for command, future in self._adapter_changes:
            if not future.done():
                pending.append((command, future))
                continue
            error = future.exception()
            if error is not None and not isinstance(error, StartupError):
                logger.error("%s: %s: %s", type(command).__name__, type(error).__name__, error)
            self._reply(command, ok=error is None, message="" if error is None else str(error))
        self._adapter_changes = pending

    def _answer(self, command: MaintenanceCommand, ok: bool, message: str, moment: bool) -> None:
        self._transport.send(Reply(command.call, ok, int(moment), message), command.front)

    def _confirm_pauses(self) -> None:
        """Answer the pauses: with nothing in flight no token follows, and the pages of a retraction are free."""
        for command in self._pauses:
            self._reply(command)
        self._pauses.clear()

    def _try_flushes(self) -> None:
        """Answer the flushes that succeeded or ran out of time.

        When only the overlapped pass of requests that have already ended is in flight, the engine counts as idle:
        a client that has seen its last stream end may flush at once, so such a flush waits for that pass.
        """
        flushed = self._scheduler.flush()
        now = self._clock()
        settling = bool(self._submitted) and not self._has_requests()
        waiting = []
        for flush in self._flushes:
            if flushed:
                self._reply(flush.command)
            elif now >= flush.deadline and not settling:
                self._reply(flush.command, ok=False)
            else:
                waiting.append(flush)
        self._flushes = waiting

    def _has_requests(self) -> bool:
        stats = self._scheduler.stats()
        return stats.num_running + stats.num_waiting > 0

    def _measure(self, call: int) -> Load:
        snapshot = self._meter.measure(self._scheduler.stats(), self._clock())
        events = self._kv_events
        if events is not None:
            snapshot = msgspec.structs.replace(
                snapshot, kv_event_batches=events.batches, kv_events=events.events, kv_event_drops=events.dropped
            )
        if self._role is not None:
            transfers = self._role.stats()
            if not call:
                transfers = msgspec.structs.replace(transfers, completed_checksums=(), pending_checksums=())
            snapshot = msgspec.structs.replace(snapshot, transfers=transfers)
        return Load(call, snapshot)

    def _reply(
        self,
        header: Abort | AbortAll | Flush | Pause | Resume | Ping | LoadAdapter | UnloadAdapter | LoadGrammar,
        *,
        ok: bool = True,
        count: int = 0,
        message: str = "",
    ) -> None:
        self._transport.send(Reply(header.call, ok, count, message), header.front)

    def _send(self, columns: OutputColumns) -> None:
        if self._role is not None:
            columns = self._role.outgoing(columns)
        if len(columns) or columns.logprobs:
            self._meter.worked()
            self._transport.send_output(columns)
