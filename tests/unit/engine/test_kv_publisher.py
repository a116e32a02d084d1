"""KV events on the wire: order, replay, overflow, a consumer that follows a real cache; the configuration."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from sglang_lite.cache import PagePool, RadixCache
from sglang_lite.cache.events import AllBlocksCleared, BlockStored, KVEvent, KVEventLog
from sglang_lite.configuration.kv_events import MOST_BYTES, KVEventsConfig
from sglang_lite.engine.kv_publisher import END_OF_REPLAY, KVEventPublisher, ReplayBuffer
from sglang_lite.types import StartupError

TIMEOUT_MS = 10_000
CLEARED = {"type": "AllBlocksCleared"}


class Consumer:
    """A subscriber that also asks for replays."""

    def __init__(self, directory: Path, topic: str = "") -> None:
        self.config = KVEventsConfig(
            "zmq",
            f"ipc://{directory}/events",
            replay_endpoint=f"ipc://{directory}/replay",
            buffer_steps=4,
            topic=topic,
            dp_rank=3,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events, self._replay = self._context.socket(zmq.XSUB), self._context.socket(zmq.DEALER)
        for socket in (self._events, self._replay):
            socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)

    def subscribe(self, publisher: KVEventPublisher) -> None:
        """Returns when batches arrive: what is published before is gone."""
        self._events.connect(self.config.endpoint)
        self._events.send(b"\x01" + self.config.topic.encode())
        self._events.setsockopt(zmq.RCVTIMEO, 20)
        end = time.monotonic() + TIMEOUT_MS / 1000
        while time.monotonic() < end:
            publisher.take([AllBlocksCleared()])
            try:
                self.receive()
            except zmq.Again:
                continue
            break
        self._events.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)

    def receive(self) -> tuple[int, list[dict[str, Any]]]:
        topic, number, payload = self._events.recv_multipart()
        assert topic == self.config.topic.encode()
        return int.from_bytes(number, "big"), self._decode(payload)

    def replay(self, first: int) -> list[tuple[int, list[dict[str, Any]]]]:
        self._replay.connect(self.config.replay_endpoint or "")
        self._replay.send_multipart([b"", b"nonsense that is no number"])
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        found: list[tuple[int, list[dict[str, Any]]]] = []
        while True:
            empty, topic, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                assert (topic, payload) == (b"", b"")
                return found
            assert topic == self.config.topic.encode()
            found.append((int.from_bytes(number, "big"), self._decode(payload)))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _decode(self, payload: bytes) -> list[dict[str, Any]]:
        moment, events, rank = msgspec.msgpack.decode(payload)
        assert abs(moment - time.time()) < 60
        assert rank == 3
        return list(events)


@pytest.fixture
def consumer(tmp_path: Path) -> Iterator[Consumer]:
    made = Consumer(tmp_path, topic="kv")
    yield made
    made.close()


@pytest.fixture
def publisher(consumer: Consumer) -> Iterator[KVEventPublisher]:
    made = KVEventPublisher(consumer.config)
    yield made
    made.close()


def follow(known: dict[int, int | None], events: list[dict[str, Any]]) -> None:
    """What a router does: hash -> hash of the page before it."""
    for event in events:
        match event["type"]:
            case "BlockStored":
                (value,) = event["block_hashes"]
                parent = event["parent_block_hash"]
                assert parent is None or parent in known
                known[value] = parent
            case "BlockRemoved":
                for value in event["block_hashes"]:
                    del known[value]
            case "AllBlocksCleared":
                known.clear()


def test_a_consumer_rebuilds_the_tree(consumer: Consumer, publisher: KVEventPublisher) -> None:
    consumer.subscribe(publisher)
    log = KVEventLog()
    cache = RadixCache(PagePool(64, 2), events=log)
    random = np.random.default_rng(5)
    known: dict[int, int | None] = {}
    last = None
    for step in range(60):
        ids = random.integers(0, 2, size=2 * int(random.integers(1, 8))).astype(np.int32)
        if step % 9 == 8:
            cache.evict(int(random.integers(1, 8)))
        elif step == 40:
            cache.flush()
        elif (pages := cache.pool.num_free) >= len(ids) // 2:
            own = cache.pool.allocate(len(ids) // 2)
            cache.pool.release(cache.insert(ids, own).duplicates(own))
            assert pages >= cache.pool.num_free
        before = publisher.batches
        publisher.take(log.drain())
        if publisher.batches == before:
            continue  # nothing changed, nothing sent
        number, events = consumer.receive()
        while events == [CLEARED] and last is None and number < before:
            number, events = consumer.receive()  # from the time of the subscription
        assert last is None or number == last + 1
        last = number
        follow(known, events)
        tree = {cache_hash for node in cache.nodes() for cache_hash in map(published, node.digests)}
        assert set(known) == tree
    assert len(known) > 3


def published(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


def test_replay_has_the_kept_batches_and_an_end(consumer: Consumer, publisher: KVEventPublisher) -> None:
    consumer.subscribe(publisher)
    for _ in range(6):
        publisher.take([AllBlocksCleared()])
    newest = publisher.batches - 1
    while consumer.receive()[0] != newest:
        pass  # when the newest has come, all are in the buffer
    assert consumer.replay(0) == [(number, [CLEARED]) for number in range(newest - 3, newest + 1)]
    assert consumer.replay(newest) == [(newest, [CLEARED])]
    assert consumer.replay(newest + 1) == []


def test_the_first_batch_voids_what_came_before(consumer: Consumer, publisher: KVEventPublisher) -> None:
    publisher.take([])
    assert publisher.batches == 1
    deadline = time.monotonic() + 10
    while (found := consumer.replay(0)) == [] and time.monotonic() < deadline:
        pass
    assert found == [(0, [CLEARED])]


def test_a_full_queue_drops_leaves_a_gap_and_starts_over(consumer: Consumer) -> None:
    config = msgspec.structs.replace(consumer.config, max_queue_size=2, buffer_steps=10_000)
    publisher = KVEventPublisher(config)
    batch: list[KVEvent] = [AllBlocksCleared()] * 2000
    while publisher.dropped < 3:
        publisher.take(batch)
    deadline = time.monotonic() + 10
    dropped = publisher.dropped
    while time.monotonic() < deadline:  # until one is taken again
        publisher.take(batch[:1])
        if publisher.dropped == dropped:
            break
        dropped = publisher.dropped
    last = publisher.batches - 1
    while (kept := consumer.replay(0))[-1][0] != last:
        assert time.monotonic() < deadline
    publisher.close()
    numbers = [number for number, _ in kept]
    assert len(numbers) == publisher.batches - dropped < last + 1, "what was dropped is a gap"
    behind_gaps = [events for (number, events), before in zip(kept[1:], numbers, strict=False) if number != before + 1]
    assert behind_gaps and all(len(events) in (2, 2001) for events in behind_gaps), "one more event: all is void"


def stored(count: int) -> list[KVEvent]:
    """Blocks with some 100 bytes each."""
    shape = {"parent_block_hash": None, "token_ids": [70_000] * 8, "block_size": 8, "lora_id": None}
    return [BlockStored(block_hashes=[number], **shape) for number in range(count)]


def test_a_large_batch_is_several_messages(consumer: Consumer, publisher: KVEventPublisher) -> None:
    consumer.subscribe(publisher)
    first, count = publisher.batches, 3 * MOST_BYTES // 100
    publisher.take(stored(count))
    assert publisher.batches - first > 2
    number, found = -1, []
    while number != publisher.batches - 1:
        number, events = consumer.receive()
        if number >= first:
            assert len(msgspec.msgpack.encode([time.time(), events, 3])) <= MOST_BYTES
            found += [event["block_hashes"][0] for event in events]
    assert found == list(range(count))


def test_a_queue_with_too_many_bytes(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the thread stands still; what follows the loss begins anew, also within one batch."""
    go = threading.Event()
    taken: list[tuple[int, bytes]] = []

    def append(self: ReplayBuffer, number: int, payload: bytes) -> None:
        assert go.wait(60)
        taken.append((number, payload))

    monkeypatch.setattr(ReplayBuffer, "append", append)
    publisher = KVEventPublisher(msgspec.structs.replace(consumer.config, max_queue_bytes=4 * MOST_BYTES))
    try:
        publisher.take(stored(20 * MOST_BYTES // 100))
        assert publisher.dropped
        go.set()
        deadline = time.monotonic() + 60
        while len(taken) + publisher.dropped < publisher.batches:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        publisher.take([])
    finally:
        go.set()
        publisher.close()
    assert 3 * MOST_BYTES < sum(len(payload) for _, payload in taken[:-1]) <= 4 * MOST_BYTES
    number, payload = taken[-1]
    assert number == publisher.batches - 1
    assert msgspec.msgpack.decode(payload)[1] == [CLEARED]


def test_replay_has_a_limit_in_bytes() -> None:
    buffer = ReplayBuffer(10, 100)
    for number in range(8):
        buffer.append(number, bytes(30))
    assert [number for number, _ in buffer.since(0)] == [5, 6, 7]
    buffer.append(8, bytes(101))
    assert not list(buffer.since(0))
    for number in range(9, 30):
        buffer.append(number, b"")
    assert [number for number, _ in buffer.since(28)] == [28, 29] and len(list(buffer.since(0))) == 10


def test_an_endpoint_that_is_taken(consumer: Consumer, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--kv-events-config: cannot bind ipc:///nowhere/at/all"):
        KVEventPublisher(KVEventsConfig("zmq", "ipc:///nowhere/at/all"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"publisher": "kafka"}, "kafka"),
        ({"publisher": "zmq", "endpont": "tcp://*:1"}, "endpont"),
        ({"publisher": "zmq", "endpoint": "inproc://here"}, "allowed are tcp://HOST:PORT"),
        ({"publisher": "zmq", "endpoint": "tcp://*:99999"}, "allowed are tcp://HOST:PORT"),
        ({"publisher": "zmq", "replay_endpoint": "tcp://*"}, "allowed are tcp://HOST:PORT"),
        ({"publisher": "zmq", "buffer_steps": 0}, "buffer_steps"),
        ({"publisher": "zmq", "buffer_bytes": 100}, "buffer_bytes"),
        ({"publisher": "zmq", "format": "other"}, "other"),
    ],
)
def test_wrong_configurations(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVEventsConfig.parse(value)


def test_configurations() -> None:
    assert KVEventsConfig.parse(None) is None
    assert KVEventsConfig.parse({}) is None
    config = KVEventsConfig.parse({"publisher": "zmq", "replay_endpoint": "tcp://*:6000"})
    assert config is not None and config.binds
    assert not KVEventsConfig("zmq", "tcp://router:5557").binds
    assert KVEventsConfig("zmq", "tcp://127.0.0.1:5557", bind=True).binds
    assert config.subscriber_messages == 4096
    second = config.for_replica(1)
    assert (second.endpoint, second.replay_endpoint, second.dp_rank) == ("tcp://*:5558", "tcp://*:6001", 1)
    assert KVEventsConfig("zmq", "ipc://a").for_replica(1).endpoint == "ipc://a_dp1"
    with pytest.raises(ValueError, match="above 65535"):
        KVEventsConfig("zmq", "tcp://*:65535").for_replica(1)
    assert config.describe(16, 2) == {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "",
        "block_size": 16,
        "dp_size": 2,
        "replay_endpoint_port_base": 6000,
    }
