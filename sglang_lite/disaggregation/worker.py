"""The session worker: a thread with an event loop that owns the sockets, the transport and the sessions of a core.

The core calls methods that only pass something on, and reads events. Everything else runs on the loop, so sessions
need no locks.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import concurrent.futures
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvloop
import zmq

from sglang_lite.disaggregation.base import Event, SessionStats
from sglang_lite.disaggregation.distributions import Distributions
from sglang_lite.disaggregation.event_queue import EventQueue
from sglang_lite.disaggregation.frames import FrameError
from sglang_lite.disaggregation.link_watch import LinkWatch
from sglang_lite.disaggregation.links import Link, LinkTable, bind_inbox
from sglang_lite.disaggregation.options import SessionOptions
from sglang_lite.disaggregation.pool_memory import PoolMemory
from sglang_lite.transfer.base import KVTransport

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.001
_FRAMES_AT_ONCE = 256
_MOST_FRAME_BYTES = 8 << 20
"""The largest frames are page indices (``frames.MOST_PAGES``) and checksums."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands.

    Attributes:
        host: address that peers reach it at.
        ports: first and last port to listen at; None for any.
        tp_rank, tp_size, dp_rank, dp_size: of its core.
        kv_replicated: every rank has the same KV (latent attention), so that one of them serves any peer.
    """

    host: str
    ports: tuple[int, int] | None = None
    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    kv_replicated: bool = False


class SessionWorker(abc.ABC):
    """What both roles share. A subclass handles messages, time and transfers.

    Args:
        transport: open; this object closes it.

    Raises:
        OSError: no port is free.
        TransferError: the transport cannot reach the pool.
    """

    name = "sessions"

    def __init__(self, place: Place, memory: PoolMemory, transport: KVTransport, options: SessionOptions) -> None:
        self.place, self.memory, self.transport, self.options = place, memory, transport, options
        # A peer that has to shut this one out names it to its own transport.
        self.instance = transport.instance
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: collections.Counter[str] = collections.Counter()
        self.seconds = 0.0
        self.distributions = Distributions()
        self._events: EventQueue[Event] = EventQueue()
        self._put: Callable[[Event], None] = self._events.put
        self._on_tick: Callable[[], None] = lambda: None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, options.max_sockets + 16)
        self.links = LinkTable(self._context, options.max_sockets)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, _MOST_FRAME_BYTES)
        self.port = bind_inbox(self._inbox, place.host, place.ports)
        self.lease = transport.register(memory.addr, memory.length, memory.location)
        self.loop = uvloop.new_event_loop()
        self.hashing = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"{self.name} checksums")
        self._tasks: set[asyncio.Task[None]] = set()
        self._poll_timer: asyncio.TimerHandle | None = None
        self._watch = LinkWatch(self.links, self.instance, options, self.spawn, self.on_lost)
        self._last_complaint = float("-inf")
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def redirect(self, put: Callable[[Event], None], on_tick: Callable[[], None] = lambda: None) -> None:
        """Before ``start``: pass events on instead of keeping them for ``events``.

        Args:
            put: takes each, on the loop.
            on_tick: called there every ``alive_interval``.
        """
        self._put, self._on_tick = put, on_tick

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def thread_id(self) -> int:
        """Of the thread, once it was started, for its CPU clock."""
        return self._thread.ident or 0

    def events(self) -> list[Event]:
        """See ``base.Sessions``."""
        return self._events.take()

    def fileno(self) -> int:
        """See ``base.Sessions``."""
        return self._events.fileno()

    def close(self, grace_s: float) -> None:
        """See ``base.Sessions``."""
        if self._closed:
            return
        self._closed = True
        if self._thread.ident is not None:
            self.loop.call_soon_threadsafe(self._stop)
            self._thread.join()
        self.hashing.shutdown()
        self.transport.close(grace_s)
        self._inbox.close(0)
        self.links.close()
        self._context.term()
        self._events.close()

    def abort(self, key: int) -> None:
        """See ``base.Sessions``."""
        self.call(self.on_abort, key)

    @abc.abstractmethod
    def stats(self) -> SessionStats:
        """See ``base.Sessions``."""

    @abc.abstractmethod
    def on_abort(self, key: int) -> None:
        """The core gives a request up."""

    @abc.abstractmethod
    def on_message(self, frames: list[bytes]) -> None:
        """A message arrived. Raises FrameError: it is malformed."""

    @abc.abstractmethod
    def on_tick(self, now: float) -> None:
        """Every ``alive_interval``: timeouts and messages to send again."""

    @abc.abstractmethod
    def on_poll(self, now: float) -> bool:
        """Look after transfers; True while there are any."""

    @abc.abstractmethod
    def on_lost(self, link: Link, is_gone: bool) -> None:
        """A peer was silent for too long, or its process is gone."""

    @abc.abstractmethod
    def on_start(self) -> None:
        """The loop runs."""

    @abc.abstractmethod
    def on_stop(self) -> None:
        """The loop will end: tell peers."""

    @abc.abstractmethod
    async def on_finish(self) -> None:
        """All tasks have ended: close what they used."""

    def emit(self, event: Event) -> None:
        """Tell the core."""
        self._put(event)

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """From the core's thread: run on the loop."""
        if not self._closed:
            self.loop.call_soon_threadsafe(function, *args)

    def spawn(self, coroutine: Any) -> asyncio.Task[None]:
        """A task that lives no longer than the worker."""
        task: asyncio.Task[None] = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def arm_poll(self) -> None:
        """Transfers are under way."""
        if self._poll_timer is None:
            self._poll_timer = self.loop.call_later(POLL_SECONDS, self._poll)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        inbox = int(self._inbox.getsockopt(zmq.FD))
        self._watch.begin(self.loop.time())
        self.loop.add_reader(inbox, self._read_inbox)
        self.loop.call_soon(self._read_inbox)
        self.loop.call_soon(self.on_start)
        self.loop.call_soon(self._tick)
        try:
            self.loop.run_forever()
        finally:
            self.loop.remove_reader(inbox)
            self.loop.close()

    def _stop(self) -> None:
        self.on_stop()
        self.spawn(self._finish())

    async def _finish(self) -> None:
        own = asyncio.current_task()
        others = [task for task in self._tasks if task is not own]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.on_finish()
        self.loop.stop()

    def _read_inbox(self) -> None:
        # The descriptor tells of changes only, so read until nothing is left.
        for _ in range(_FRAMES_AT_ONCE):
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self.on_message(frames)
            except FrameError as error:
                self._note_malformed(error)
            except BaseException:
                self.loop.call_soon(self._read_inbox)  # the fault of one message; those behind it wait
                raise
        self.loop.call_soon(self._read_inbox)

    def _note_malformed(self, error: FrameError) -> None:
        """Count it, and say so, but not more often than once a second: whoever reaches the port can send many."""
        self.counts["malformed"] += 1
        now = self.loop.time()
        if now - self._last_complaint >= 1.0:
            self._last_complaint = now
            count = self.counts["malformed"]
            logger.warning("%s: a malformed message was ignored (%d so far): %s", self.name, count, error)

    def _poll(self) -> None:
        self._poll_timer = None
        if self.on_poll(self.loop.time()):
            self.arm_poll()

    def _tick(self) -> None:
        now = self.loop.time()
        self.loop.call_later(self.options.alive_interval, self._tick)
        self._watch.tick(now)
        self.on_tick(now)
        self._on_tick()

    def link_to(self, ip: str, port: int, instance: str) -> Link:
        """See ``LinkWatch.link_to``."""
        return self._watch.link_to(ip, port, instance, self.loop.time())

    def bury(self, link: Link) -> None:
        """The process of a peer is gone."""
        self._watch.bury(link)
