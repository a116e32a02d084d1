"""The front's side of the sockets: sends commands, dispatches what the core sends, notices its death."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from sglang_lite.engine.control_calls import FRONT, WEIGHTS_TIMEOUT, ControlCalls, EngineDeadError
from sglang_lite.engine.frames import (
    Event,
    Frame,
    FrameError,
    decode_event,
    encode_control,
    encode_keys,
    encode_requests,
)
from sglang_lite.engine.info import EngineInfo, LoadSnapshot
from sglang_lite.engine.launcher import CORE_COMMAND, CoreProcess, describe_exit, egress_of, ingress_of
from sglang_lite.engine.messages import (
    Abort,
    Failure,
    Finish,
    Load,
    Ping,
    Progress,
    Ready,
    Reply,
    Shutdown,
)
from sglang_lite.engine.pulse import Pulse
from sglang_lite.engine.transport import HIGH_WATER_MARK
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.types import Int64Array, OutputColumns, RequestColumns, StartupError

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.005
"""Pause before commands that met a full socket queue are offered again."""

ROWS_PER_WAKEUP = 4096
"""Rows handled before the event loop, and with it the readers of those rows, gets its turn."""


class Listener(Protocol):
    """Who hears what the core sends of its own accord; called in the event loop."""

    def take_output(self, columns: OutputColumns) -> None:
        """The rows of a step."""

    def take_load(self, snapshot: LoadSnapshot) -> None:
        """A periodic load report."""

    def lose_core(self, reason: str) -> None:
        """The core is lost; called once, and never after ``close``."""


class EngineClient(ControlCalls):
    """Talks to one engine core.

    Args:
        on_progress: called with (message, fraction or a negative number) while the core starts.
        front: number of this front; the one that starts the core is 0.
    """

    def __init__(self, on_progress: Callable[[str, float], None] | None = None, *, front: int = FRONT) -> None:
        super().__init__(front)
        self._on_progress = on_progress
        self._listener: Listener | None = None
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._egress: zmq.Socket[bytes] | None = None
        self._ingress: zmq.Socket[bytes] | None = None
        self._process: CoreProcess | None = None
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._calls: dict[int, asyncio.Future[Reply | Load]] = {}
        self._call_numbers = itertools.count(1)
        self._outbox: deque[Frame] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._closing = False
        self._pulse = Pulse()
        self._long_calls = 0
        self.failure: str | None = None

    async def start(
        self, config: str, *, timeout: float | None, command: Sequence[str] = CORE_COMMAND, fronts: int = 1
    ) -> EngineInfo:
        """Start the core and wait until it serves.

        Args:
            fronts: fronts that the core answers; the others ``attach`` to it.

        Raises:
            StartupError: the core refused the configuration, died or was not ready in time. Nothing is left behind.
        """
        self._process = CoreProcess(config, command, fronts=fronts)
        self._bind(self._process.egress[self._front])
        try:
            await self._process.start(self._core_exited)
            info = await asyncio.wait_for(asyncio.shield(self._ready), timeout)
        except TimeoutError:
            await self.close(grace=0.0)
            raise StartupError(f"the engine core was not ready within {timeout:g} s") from None
        except StartupError:
            await self.close(grace=1.0)
            raise
        except BaseException:
            await self.close(grace=0.0)
            raise
        self._connect(self._process.ingress)
        return info

    def attach(self, directory: str) -> None:
        """Talk to a core that another front has started, over the sockets in ``directory``."""
        self._bind(egress_of(directory, self._front))
        self._connect(ingress_of(directory))

    def _bind(self, egress: str) -> None:
        self._egress = self._context.socket(zmq.PULL)
        self._egress.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._egress.bind(egress)
        self._loop.add_reader(_descriptor(self._egress), self._drain_egress)

    def _connect(self, ingress: str) -> None:
        self._ingress = self._context.socket(zmq.PUSH)
        self._ingress.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._ingress.connect(ingress)

    def listen(self, listener: Listener) -> None:
        """From now on ``listener`` hears the core; before, there is nothing to hear."""
        self._listener = listener
        if self.failure is not None:
            listener.lose_core(self.failure)

    @property
    def directories(self) -> list[str]:
        """Private directory of the core's sockets, of which the first front has the core's process."""
        return [] if self._process is None else [self._process.directory]

    def lose_core(self, reason: str) -> None:
        """The front that has the core's process says that it is gone."""
        self._lose_core(reason)

    @property
    def process_id(self) -> int | None:
        """Of the core."""
        return self._process.process_id if self._process is not None else None

    def wanted_replica(self, request: GenerateRequest) -> int | None:
        """The replica that the request names."""
        return request.replica

    def submit(self, columns: RequestColumns, wanted: Sequence[int | None] = ()) -> None:
        """Send new requests. ``wanted`` names replicas, of which there is one (see ``replicas.ReplicaClient``)."""
        self._send(encode_requests(columns))

    def finish(self, keys: Sequence[int] | Int64Array) -> None:
        """Tell the core that the front ended these requests."""
        self._send(encode_keys(Finish(), keys))

    def abort_nowait(self, keys: Sequence[int]) -> None:
        """Abort without waiting for the answer (a client went away)."""
        self._send(encode_keys(Abort(self._front, 0), keys))

    async def close(self, grace: float = 5.0) -> None:
        """End the core and release sockets and directory. Calls that still wait end with ``EngineDeadError``."""
        if self._closing:
            return
        self._closing = True
        if self._process is not None:
            self._send(encode_control(Shutdown()))  # whoever only attached leaves it to the others
        if self._retry is not None:
            self._retry.cancel()
        if self._process is not None:
            await self._process.close(grace)
        self._lose_core("the engine was closed")
        if self._egress is not None:
            self._loop.remove_reader(_descriptor(self._egress))
            self._egress.close(0)
        if self._ingress is not None:
            self._ingress.close(0)
        self._context.term()

    def look(self) -> int:
        """Ask the core for a sign of life, unless it owes one; looks in a row at which it had said nothing.

        One that is gone is not silent: ``failure`` says what it is.
        """
        if self.failure is not None:
            return 0
        missed = self._pulse.look(excused=self._long_calls > 0)
        if not self._pulse.asked:
            self._pulse.asked = True
            # Nobody waits for this answer: that it comes is all that counts.
            self._send(encode_control(Ping(self._front, next(self._call_numbers))))
        return missed

    async def _exchange(self, encode: Callable[[int], Frame], timeout: float) -> Reply | Load:
        call, future = self._new_call()
        takes_long = timeout >= WEIGHTS_TIMEOUT
        self._long_calls += takes_long
        try:
            self._send(encode(call))
            return await self._answer(call, future, timeout)
        finally:
            self._long_calls -= takes_long

    def _new_call(self) -> tuple[int, asyncio.Future[Reply | Load]]:
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        call = next(self._call_numbers)
        future = self._calls[call] = self._loop.create_future()
        return call, future

    async def _answer(self, call: int, future: asyncio.Future[Reply | Load], timeout: float) -> Reply | Load:
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise EngineDeadError(f"the engine core did not answer a control call within {timeout:g} s") from None
        finally:
            self._calls.pop(call, None)

    def _send(self, frame: Frame) -> None:
        if self.failure is not None:
            return
        self._outbox.append(frame)
        if self._retry is None:
            self._drain_outbox()

    def _drain_outbox(self) -> None:
        """Offer queued frames to the socket; what it cannot take waits here, in order."""
        self._retry = None
        if self._ingress is None:
            self._outbox.clear()
            return
        while self._outbox:
            try:
                self._ingress.send_multipart(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                self._retry = self._loop.call_later(RETRY_SECONDS, self._drain_outbox)
                return
            self._outbox.popleft()

    def _drain_egress(self) -> None:
        """Handle what has arrived. The descriptor signals edges only, so what is left over schedules the next turn."""
        rows = 0
        while rows < ROWS_PER_WAKEUP:
            if self._egress is None or self._egress.closed:
                return
            try:
                event = decode_event(self._egress.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            except FrameError as error:
                logger.warning("ignored a malformed frame: %s", error)
                continue
            rows += len(event) if isinstance(event, OutputColumns) else 1
            self._pulse.heard = True
            self._dispatch(event)
        self._loop.call_soon(self._drain_egress)

    def _dispatch(self, event: Event) -> None:
        match event:
            case OutputColumns():
                if self._listener is not None:
                    self._listener.take_output(event)
            case Reply(call=call) | Load(call=call) if call:
                future = self._calls.get(call)
                if future is not None and not future.done():
                    future.set_result(event)
            case Load(snapshot=snapshot):
                if self._listener is not None:
                    self._listener.take_load(snapshot)
            case Progress(message=message, fraction=fraction):
                if self._on_progress is not None:
                    self._on_progress(message, fraction)
            case Ready(info=info):
                if not self._ready.done():
                    self._ready.set_result(info)
            case Failure(message=message, startup=startup):
                self._core_failed(message, startup)
            case _:
                logger.debug("no one waits for %s", type(event).__name__)

    def _core_failed(self, message: str, startup: bool) -> None:
        if startup and not self._ready.done():
            self._ready.set_exception(StartupError(message))
            return
        self._lose_core(message)

    def _core_exited(self, code: int) -> None:
        """The process has ended. Its last words may still be in the socket and say more than the exit code."""
        self._drain_egress()
        if not self._ready.done() and not self._closing:
            self._ready.set_exception(StartupError(f"{describe_exit(code)} before it was ready"))
        self._lose_core(describe_exit(code))

    def _lose_core(self, reason: str) -> None:
        if self.failure is not None:
            return
        self.failure = reason
        # Nobody takes these any more; offering them again and again would keep the event loop busy.
        self._outbox.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))
        if not self._closing:
            logger.error("%s", reason)
            if self._listener is not None:
                self._listener.lose_core(reason)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    """The descriptor that becomes readable when the socket has news."""
    return int(socket.getsockopt(zmq.FD))
