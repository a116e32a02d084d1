"""Following one publisher of KV events: what came is applied in order, what was missed is asked for again."""

from __future__ import annotations

import asyncio
import itertools
import logging

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from sglang_lite.router.kv_index import BlockIndex
from sglang_lite.router.kv_source import Source
from sglang_lite.router.kv_wire import Change, WrongEventsError, read_batch

logger = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8
_REPLAY_SECONDS = 5.0
_WAITING, _REPLAYED = 256, 10_000
"""Messages that wait here, new ones and of a replay; what is more waits at the publisher."""
_LARGEST_MESSAGE = 16 << 20
_TURN = 32
"""Messages between two looks at what else the event loop has to do."""


class Follower:
    """What one source holds, by the sequence numbers of its batches. No I/O.

    Attributes:
        expected: number of the next batch; None before the first.
        complete: all that the source holds is known: everything since it said that it holds nothing.
    """

    def __init__(self, index: BlockIndex, slot: int) -> None:
        self._index = index
        self.slot = slot
        self.expected: int | None = None
        self.complete = False

    def reset(self) -> None:
        """Nothing is known any more."""
        self._forget()
        self.expected = None

    def misses(self, number: int) -> bool:
        """Whether batches before this one have not come."""
        return number > (self.expected or 0)

    def take(self, number: int, changes: list[Change] | None) -> None:
        """Apply a batch, None for one that could not be read. One that came before changes nothing.

        Behind a gap everything is forgotten: what was removed in between is not known.
        """
        if number == 0:
            self._forget()  # a new publisher: it counts from the start
        elif self.expected is not None and number < self.expected:
            return
        elif self.misses(number) or changes is None:
            self._forget()
        self.expected = number + 1
        for change in changes or ():
            if change.kind == "cleared":
                self._forget()
                self.complete = True
            elif change.kind == "removed":
                self._index.remove(self.slot, change.hashes)
            elif not self._index.store(self.slot, change.hashes):
                self.complete = False

    def _forget(self) -> None:
        self._index.clear(self.slot)
        self.complete = False


class Subscription:
    """The sockets of one source.

    Every connection starts from nothing and a replay: the publisher may be a new one. Without a replay endpoint the
    source is known completely from its next ``AllBlocksCleared`` on.
    """

    def __init__(self, context: zmq.asyncio.Context, source: Source, follower: Follower) -> None:
        self._context = context
        self._source = source
        self._follower = follower

    async def run(self) -> None:
        """Follow until cancelled.

        Raises:
            zmq.ZMQError: an endpoint that cannot be used.
        """
        events = self._socket(zmq.SUB)
        events.setsockopt(zmq.RCVHWM, _WAITING)
        events.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
        monitor = events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            events.connect(self._source.endpoint)
            await self._follow(events, monitor)
        finally:
            self._follower.reset()
            events.disable_monitor()
            events.close(0)

    async def _follow(self, events: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(events, zmq.POLLIN)
        taken = 0
        while True:
            ready = dict(await poller.poll())
            if monitor in ready:
                told = parse_monitor_message(await monitor.recv_multipart())
                self._follower.reset()
                if told["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    await self._replay(0)
                else:
                    logger.info("KV events of %s: disconnected", self._source.endpoint)
            elif events in ready:
                await self._take(await events.recv_multipart())
                taken += 1
                if taken % _TURN == 0:
                    await asyncio.sleep(0)

    async def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            return
        number = int.from_bytes(frames[1], "big")
        if self._follower.misses(number):
            await self._replay(self._follower.expected or 0)
        self._apply(number, frames[2])

    def _apply(self, number: int, payload: bytes) -> None:
        try:
            changes: list[Change] | None = read_batch(payload)
        except WrongEventsError as error:
            logger.warning("KV events of %s: batch %d: %s", self._source.endpoint, number, error)
            changes = None
        self._follower.take(number, changes)

    async def _replay(self, first: int) -> None:
        """Ask for the batches from ``first`` on that the publisher still has; without an answer there are none."""
        if self._source.replay is None:
            return
        # A socket of its own each time: an answer that comes late is not taken for the next one.
        replay = self._socket(zmq.DEALER)
        replay.setsockopt(zmq.RCVHWM, _REPLAYED)
        try:
            replay.connect(self._source.replay)
            await replay.send_multipart([b"", first.to_bytes(8, "big")])
            for taken in itertools.count(1):
                async with asyncio.timeout(_REPLAY_SECONDS):
                    frames = await replay.recv_multipart()
                if len(frames) != 4 or frames[2] == END_OF_REPLAY:
                    return
                self._apply(int.from_bytes(frames[2], "big"), frames[3])
                if taken % _TURN == 0:
                    await asyncio.sleep(0)
        except TimeoutError:
            logger.warning("KV events of %s: no replay within %g s", self._source.replay, _REPLAY_SECONDS)
        finally:
            replay.close(0)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)
        return socket
