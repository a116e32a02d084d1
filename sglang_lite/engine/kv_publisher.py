"""Publishes KV events over ZMQ from a thread of its own; the core loop never waits for a subscriber."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec
import zmq

from sglang_lite.cache.events import AllBlocksCleared, KVEvent
from sglang_lite.configuration.kv_events import MOST_BYTES, KVEventsConfig
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8
"""Sequence number of the message that ends a replay."""

SEQUENCE_BYTES = 8
_QUEUE = "inproc://kv-events"
_STOP = b""
_CLOSE_SECONDS = 2.0
_LINGER_MS = 1000

_Socket = zmq.Socket[bytes]


class ReplayBuffer:
    """The newest messages: at most ``count`` of them, and ``num_bytes`` of payload."""

    def __init__(self, count: int, num_bytes: int) -> None:
        self._count = count
        self._num_bytes = num_bytes
        self._held = 0
        self._messages: deque[tuple[int, bytes]] = deque()

    def append(self, number: int, payload: bytes) -> None:
        """Keep a message, and forget the oldest where there are too many."""
        self._messages.append((number, payload))
        self._held += len(payload)
        while len(self._messages) > self._count or self._held > self._num_bytes:
            self._held -= len(self._messages.popleft()[1])

    def since(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Those from number ``first`` on, the oldest first."""
        return ((number, payload) for number, payload in self._messages if number >= first)


class KVEventPublisher:
    """Takes batches of events from the core loop and sends them; a large one in several messages.

    A message that finds the queue full is dropped: its sequence number is missing, and the next one starts with
    ``AllBlocksCleared``, so that a consumer that goes on knows too little rather than something wrong. The first of
    all is ``AllBlocksCleared`` too: what an earlier process at the endpoint published is void.

    Attributes:
        batches, events: messages, and events taken from the core loop, dropped ones included.
        dropped: messages that found the queue full.

    Raises:
        StartupError: an endpoint cannot be bound.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self._config = config
        self._topic = config.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = ReplayBuffer(config.buffer_steps, config.buffer_bytes)
        self._put_bytes = 0  # written by the core loop only
        self._taken_bytes = 0  # written by the thread only
        self._numbers = itertools.count()
        self._lost = True
        self.batches = 0
        self.events = 0
        self.dropped = 0
        self._context: zmq.Context[_Socket] = zmq.Context()
        self._open: list[_Socket] = []
        try:
            self._pull, self._queue = self._make_queue()
            self._publish = self._socket(zmq.PUB, config.subscriber_messages, config.endpoint, bind=config.binds)
            self._replay = None
            if config.replay_endpoint is not None:
                # Room for a whole replay: what does not fit would be lost without a word.
                self._replay = self._socket(zmq.ROUTER, config.buffer_steps + 1, config.replay_endpoint, bind=True)
        except StartupError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        self.take([])

    def take(self, events: list[KVEvent]) -> None:
        """Queue a batch; from the core loop. An empty one is nothing, except behind a loss."""
        if self._lost:
            events = [AllBlocksCleared(), *events]
        if not events:
            return
        first = True
        for part, payload in self._messages(events):
            if self._lost and not first:
                self._send([AllBlocksCleared(), *part], self._encode([AllBlocksCleared(), *part]))
            else:
                self._send(part, payload)
            first = False

    def _messages(self, events: list[KVEvent]) -> Iterator[tuple[list[KVEvent], bytes]]:
        payload = self._encode(events)
        if len(payload) <= MOST_BYTES or len(events) == 1:
            yield events, payload
            return
        middle = len(events) // 2
        yield from self._messages(events[:middle])
        yield from self._messages(events[middle:])

    def _encode(self, events: list[KVEvent]) -> bytes:
        return self._encoder.encode([time.time(), events, self._config.dp_rank])

    def _send(self, events: list[KVEvent], payload: bytes) -> None:
        number = next(self._numbers)
        self.batches += 1
        self.events += len(events)
        try:
            if self._put_bytes - self._taken_bytes + len(payload) > self._config.max_queue_bytes:
                raise zmq.Again
            self._queue.send_multipart([number.to_bytes(SEQUENCE_BYTES, "big"), payload], zmq.NOBLOCK)
            self._put_bytes += len(payload)
            self._lost = False
        except zmq.Again:
            if not self.dropped:
                config = self._config
                size, most = config.max_queue_size, config.max_queue_bytes
                logger.warning("KV events: the queue of %d messages, %d bytes, is full; dropping", size, most)
            self._lost = True
            self.dropped += 1

    def close(self) -> None:
        """Send what is queued, then end the thread and close the sockets. Takes two seconds at most."""
        self._queue.setsockopt(zmq.SNDTIMEO, int(_CLOSE_SECONDS * 1000))
        try:
            self._queue.send(_STOP)
        except zmq.Again:
            logger.warning("KV events: the publishing thread does not take its queue")
            return
        self._thread.join(_CLOSE_SECONDS)
        self._queue.close(0)
        if self._thread.is_alive():
            logger.warning("KV events: the publishing thread does not end")
            return
        self._context.term()

    def _make_queue(self) -> tuple[_Socket, _Socket]:
        """Both ends of the queue. Of an inproc pair the high water marks add up."""
        pull, push = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._open.append(pull)
        pull.setsockopt(zmq.RCVHWM, 1)
        push.setsockopt(zmq.SNDHWM, self._config.max_queue_size)
        pull.bind(_QUEUE)
        push.connect(_QUEUE)
        return pull, push

    def _socket(self, kind: int, limit: int, endpoint: str, *, bind: bool) -> _Socket:
        socket = self._context.socket(kind)
        self._open.append(socket)
        socket.setsockopt(zmq.SNDHWM, limit)
        try:
            if bind:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            verb = "bind" if bind else "connect to"
            raise StartupError(f"--kv-events-config: cannot {verb} {endpoint}: {error.strerror}") from None
        return socket

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # the engine goes on serving; batches are then dropped and counted
            logger.exception("KV events: the publishing thread failed")
        finally:
            for socket in self._open:
                socket.close(_LINGER_MS)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._pull in ready:
                frames = self._pull.recv_multipart()
                if len(frames) == 1:
                    return
                self._taken_bytes += len(frames[1])
                self._buffer.append(int.from_bytes(frames[0], "big"), frames[1])
                self._publish.send_multipart([self._topic, *frames])
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay, self._replay.recv_multipart())

    def _answer(self, replay: _Socket, request: list[bytes]) -> None:
        """Repeat the kept batches from the number that a consumer asks for."""
        if len(request) != 3 or request[1] != b"" or len(request[2]) != SEQUENCE_BYTES:
            logger.debug("KV events: ignored a malformed replay request of %d frames", len(request))
            return
        consumer, first = request[0], int.from_bytes(request[2], "big")
        for number, payload in self._buffer.since(first):
            frames = [self._topic, number.to_bytes(SEQUENCE_BYTES, "big"), payload]
            replay.send_multipart([consumer, b"", *frames])
        replay.send_multipart([consumer, b"", b"", END_OF_REPLAY, b""])
