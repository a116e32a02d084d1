"""KV events of this server's replicas for one subscriber: what was published, in its order, without a hole.

The publisher lives in the engine's process and talks ZMQ. A feed reads it as fast as it comes into a bounded queue:
a subscriber that is too slow loses its subscription, and neither the publisher nor this process keeps more for it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import zmq
import zmq.asyncio

from sglang_lite.configuration.kv_events import KVEventsConfig
from sglang_lite.types import RequestError

QUEUE_BATCHES = 4096
QUEUE_BYTES = 64 * 1024 * 1024
_IDLE_SECONDS = 5.0
"""After a silence the replay is asked whether a batch was missed."""
_REPLAY_SECONDS = 10.0
_NUMBER_BYTES = 8
_END = b"\xff" * _NUMBER_BYTES


@dataclass(frozen=True, slots=True)
class Batch:
    """One published batch.

    Attributes:
        number: of the replica's batches.
        payload: msgpack of ``[seconds, events, replica]``.
        after_hole: batches before it are lost for good.
    """

    number: int
    payload: bytes
    after_hole: bool


class BatchQueue:
    """Batches that wait for a subscriber.

    Args:
        batches, size: most batches and bytes that may wait.
    """

    def __init__(self, batches: int = QUEUE_BATCHES, size: int = QUEUE_BYTES) -> None:
        self._queue: asyncio.Queue[Batch] = asyncio.Queue(batches)
        self._size = size
        self._waiting = 0

    def put(self, batch: Batch) -> None:
        """Add a batch.

        Raises:
            RequestError: 429, the subscriber is too slow.
        """
        if self._queue.full() or self._waiting + len(batch.payload) > self._size:
            raise RequestError(
                f"the subscriber is slower than the events: {self._queue.qsize()} batches wait; "
                f"subscribe again from the last sequence number + 1",
                status=429,
            )
        self._waiting += len(batch.payload)
        self._queue.put_nowait(batch)

    async def get(self) -> Batch:
        """The oldest batch."""
        batch = await self._queue.get()
        self._waiting -= len(batch.payload)
        return batch


def check_feed(config: KVEventsConfig | None, start: int) -> KVEventsConfig:
    """The configuration of what is published.

    Raises:
        RequestError: 501 where nothing is published to this process, 412 where old batches are not kept.
    """
    if config is None:
        message = 'KV events need a server with --kv-events-config \'{"publisher": "zmq", ...}\''
        raise RequestError(message, status=501)
    if not config.binds:
        raise RequestError(f"KV events are published to {config.endpoint}, not to this process", status=501)
    if start and config.replay_endpoint is None:
        raise RequestError("start_sequence_number needs a replay_endpoint in --kv-events-config", status=412)
    return config


class ReplicaFeed:
    """Follows one publisher.

    Args:
        context: makes the sockets; they are closed when ``run`` ends.
        config: of the replica.
        start: number of the first batch that is wanted, as far as it is kept.
    """

    def __init__(self, context: zmq.asyncio.Context, config: KVEventsConfig, start: int, queue: BatchQueue) -> None:
        self._config = config
        self._queue = queue
        self._expected = start
        self._began = False
        self._context = context

    async def run(self) -> None:
        """Put batches into the queue until cancelled.

        Raises:
            RequestError: the subscriber is too slow, or batches were lost after the first one.
        """
        live = self._context.socket(zmq.SUB)
        replay = None if self._config.replay_endpoint is None else self._context.socket(zmq.DEALER)
        try:
            live.setsockopt(zmq.SUBSCRIBE, self._config.topic.encode())
            live.connect(_local(self._config.endpoint))
            if replay is not None and self._config.replay_endpoint is not None:
                replay.connect(_local(self._config.replay_endpoint))
                await self._repeat(replay)
            while True:
                await self._step(live, replay)
        finally:
            live.close(0)
            if replay is not None:
                replay.close(0)

    async def _step(self, live: zmq.asyncio.Socket, replay: zmq.asyncio.Socket | None) -> None:
        if not await live.poll(int(_IDLE_SECONDS * 1000)):
            if replay is not None:
                await self._repeat(replay)
            return
        _, number_bytes, payload = await live.recv_multipart()
        number = int.from_bytes(number_bytes, "big")
        if number > self._expected and replay is not None:
            await self._repeat(replay)
        self._take(number, payload)

    async def _repeat(self, replay: zmq.asyncio.Socket) -> None:
        """Take what is kept from the expected batch on."""
        await replay.send_multipart([b"", self._expected.to_bytes(_NUMBER_BYTES, "big")])
        try:
            async with asyncio.timeout(_REPLAY_SECONDS):
                while True:
                    _, _, number, payload = await replay.recv_multipart()
                    if number == _END:
                        return
                    self._take(int.from_bytes(number, "big"), payload)
        except TimeoutError:
            raise RequestError("the publisher of KV events does not answer", status=503) from None

    def _take(self, number: int, payload: bytes) -> None:
        if number < self._expected:
            return
        hole = number > self._expected
        if hole and self._began:
            lost = number - self._expected
            raise RequestError(f"{lost} batches were lost; subscribe again from {number}", status=429)
        self._queue.put(Batch(number, payload, hole))
        self._began = True
        self._expected = number + 1


def _local(endpoint: str) -> str:
    """How an endpoint that is bound on this machine is reached from it."""
    for wildcard in ("*", "0.0.0.0"):
        endpoint = endpoint.replace(f"tcp://{wildcard}:", "tcp://127.0.0.1:")
    return endpoint.replace("tcp://[::]:", "tcp://[::1]:").replace("tcp://:::", "tcp://[::1]:")
