"""``SubscribeKvEvents`` over the real publisher: order, replay, holes, slow subscribers, the end of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import zmq.asyncio

from sglang_lite.cache.block_hash import block_hashes
from sglang_lite.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from sglang_lite.configuration.kv_events import KVEventsConfig
from sglang_lite.engine.kv_publisher import KVEventPublisher
from sglang_lite.rpc import kv_subscription
from sglang_lite.rpc.generated.sglang.grpc.scheduler import sglang_scheduler_pb2_grpc
from sglang_lite.rpc.generated.smg.grpc.common import common_pb2 as common
from sglang_lite.rpc.kv_feed import Batch, BatchQueue, ReplicaFeed
from sglang_lite.rpc.kv_messages import batch_message
from sglang_lite.rpc.server import listening
from sglang_lite.server.context import Phase, ServerContext
from sglang_lite.types import RequestError
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_server import grpc_server
from tests.support.server import free_port


def stored(value: int, **more: Any) -> BlockStored:
    return BlockStored(
        block_hashes=[value], parent_block_hash=None, token_ids=[value, 7], block_size=2, lora_id=None, **more
    )


def published(folder: Path, **more: Any) -> dict[str, Any]:
    return {"publisher": "zmq", "endpoint": f"ipc://{folder}/e", "replay_endpoint": f"ipc://{folder}/r", **more}


class Server:
    """A server without an engine, and the publishers that its replicas would have."""

    def __init__(self, context: ServerContext, publishers: list[KVEventPublisher], stub: Any) -> None:
        self.context = context
        self.publishers = publishers
        self._stub = stub

    def publish(self, *events: KVEvent, rank: int = 0) -> None:
        self.publishers[rank].take(list(events))

    def subscribe(self, start: int = 0, **more: Any) -> Any:
        request = common.SubscribeKvEventsRequest(start_sequence_number=start)
        return self._stub.SubscribeKvEvents(request, **more)


@asynccontextmanager
async def serving(config: dict[str, Any] | None, **options: Any) -> AsyncIterator[Server]:
    engine = FakeEngine(
        lambda request: [],
        grpc_mode=True,
        port=0,
        smg_http_sidecar_port=free_port(),
        kv_events_config=config,
        **options,
    )
    context = ServerContext(engine)  # type: ignore[arg-type]
    context.phase = Phase.READY
    parsed = KVEventsConfig.parse(config)
    replicas = range(options.get("dp_size", 1)) if parsed is not None and parsed.binds else ()
    publishers = [KVEventPublisher(parsed.for_replica(rank)) for rank in replicas if parsed is not None]
    try:
        async with listening(context), grpc.aio.insecure_channel(f"127.0.0.1:{context.port}") as channel:
            stub = sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)  # type: ignore[no-untyped-call]
            yield Server(context, publishers, stub)
    finally:
        for publisher in publishers:
            await asyncio.to_thread(publisher.close)


async def take(call: Any, count: int) -> list[Any]:
    async with asyncio.timeout(10):
        return [await call.read() for _ in range(count)]


async def ends_with(call: Any) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(20):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
    return caught.value.code(), caught.value.details() or ""


async def test_what_was_published_and_what_comes(tmp_path: Path) -> None:
    async with serving(published(tmp_path)) as server:
        server.publish(stored(1), stored(2, cache_salt="s", lora_name="l"))
        call = server.subscribe()
        first, second = await take(call, 2)
        assert [event.WhichOneof("data") for event in first.events] == ["cleared"]
        assert (first.sequence_number, second.sequence_number, second.dp_rank) == (0, 1, 0)
        one, two = (event.stored for event in second.events)
        assert (one.blocks[0].block_hash, list(one.blocks[0].token_ids), one.blocks[0].block_size) == (1, [1, 7], 2)
        assert one.tier == common.KV_CACHE_TIER_DEVICE and not one.HasField("parent_block_hash")
        assert (two.cache_salt, two.lora_name) == ("s", "l")
        for number in range(2, 50):
            server.publish(stored(number))
        server.publish(BlockRemoved(block_hashes=[3, 4]), AllBlocksCleared())
        later = await take(call, 49)
        assert [batch.sequence_number for batch in later] == list(range(2, 51))
        removed, cleared = later[-1].events
        assert list(removed.removed.block_hashes) == [3, 4] and cleared.WhichOneof("data") == "cleared"
        ids = [event.event_id for batch in (first, second, *later) for event in batch.events]
        assert ids == sorted(set(ids))
        call.cancel()
        again = server.subscribe(40)
        assert [batch.sequence_number for batch in await take(again, 11)] == list(range(40, 51))
        again.cancel()


async def test_batches_that_are_no_longer_kept(tmp_path: Path) -> None:
    """The first batch says that what was known before is void."""
    async with serving(published(tmp_path, buffer_steps=2)) as server:
        for number in range(6):
            server.publish(stored(number))
        call = server.subscribe(2)
        (batch,) = await take(call, 1)
        assert batch.sequence_number > 2
        assert [event.WhichOneof("data") for event in batch.events] == ["cleared", "stored"]
        call.cancel()


async def test_replicas_have_their_own_numbers(tmp_path: Path) -> None:
    async with serving(published(tmp_path), dp_size=2) as server:
        server.publish(stored(1))
        server.publish(stored(2), rank=1)
        call = server.subscribe()
        batches = await take(call, 4)
        assert sorted((batch.dp_rank, batch.sequence_number) for batch in batches) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        call.cancel()


async def test_without_replay_only_what_comes(tmp_path: Path) -> None:
    async with serving(published(tmp_path, replay_endpoint=None)) as server:
        assert (await ends_with(server.subscribe(1)))[0] is grpc.StatusCode.FAILED_PRECONDITION
        call = server.subscribe()
        reading = asyncio.create_task(take(call, 1))
        while not reading.done():  # until the subscription has reached the publisher
            server.publish(stored(1))
            await asyncio.sleep(0.02)
        kinds = [event.WhichOneof("data") for event in reading.result()[0].events]
        assert kinds[0] == "cleared"
        call.cancel()


@pytest.mark.parametrize("config", [None, {"publisher": "zmq", "endpoint": "tcp://router:5557"}])
async def test_servers_that_publish_nothing_here(config: Any) -> None:
    async with serving(config) as server:
        code, message = await ends_with(server.subscribe())
        assert code is grpc.StatusCode.UNIMPLEMENTED and "KV events" in message


async def test_a_slow_subscriber_ends_with_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_subscription, "BatchQueue", lambda: BatchQueue(8))
    async with serving(published(tmp_path)) as server:
        slow, quick = server.subscribe(), server.subscribe()
        await take(slow, 1)
        await take(quick, 1)
        big = stored(1, lora_name="x" * 100_000)
        for number in range(1, 200):
            server.publish(big)
            (batch,) = await take(quick, 1)
            assert batch.sequence_number == number
        code, message = await ends_with(slow)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "slower than the events" in message
        quick.cancel()


async def test_subscribers_are_counted_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_subscription, "MAX_SUBSCRIBERS", 1)
    async with serving(published(tmp_path)) as server:
        call = server.subscribe()
        await take(call, 1)
        assert (await ends_with(server.subscribe()))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        async with asyncio.timeout(10):
            while True:
                another = server.subscribe()
                if await _first(another):
                    break
        server.context.phase = Phase.DRAINING
        code, message = await ends_with(another)
        assert code is grpc.StatusCode.UNAVAILABLE and "going down" in message


async def _first(call: Any) -> bool:
    try:
        return (await call.read()) is not grpc.aio.EOF
    except grpc.aio.AioRpcError:
        return False


async def test_a_hole_that_cannot_be_filled_ends_the_subscription() -> None:
    queue = BatchQueue()
    feed = ReplicaFeed(zmq.asyncio.Context(), KVEventsConfig(publisher="zmq"), 0, queue)
    for number in (5, 4, 6):
        feed._take(number, b"x")
    taken = [await queue.get() for _ in range(2)]
    assert [(batch.number, batch.after_hole) for batch in taken] == [(5, True), (6, False)]
    with pytest.raises(RequestError, match="subscribe again from 9") as caught:
        feed._take(9, b"x")
    assert caught.value.status == 429
    small = BatchQueue(10, 10)
    feed = ReplicaFeed(zmq.asyncio.Context(), KVEventsConfig(publisher="zmq"), 0, small)
    feed._take(0, b"12345678")
    with pytest.raises(RequestError, match="slower"):
        feed._take(1, b"123")


async def test_events_need_the_key_of_operators(tmp_path: Path) -> None:
    async with serving(published(tmp_path), api_key="user", admin_api_key="admin") as server:
        user, admin = ((("authorization", f"Bearer {name}"),) for name in ("user", "admin"))
        assert (await ends_with(server.subscribe(metadata=user)))[0] is grpc.StatusCode.UNAUTHENTICATED
        call = server.subscribe(metadata=admin)
        await take(call, 1)
        call.cancel()


async def test_a_real_engine(chain_model: Path, tmp_path: Path) -> None:
    """The hashes of a prompt that was served, and loads before the first batch."""
    options = {"page_size": 4, "max_total_tokens": 1024, "kv_events_config": published(tmp_path)}
    async with grpc_server(chain_model, **options) as clients:
        ids = list(range(3, 15))
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        assert (await clients.http.post("/generate", body)).status == 200
        request = common.SubscribeKvEventsRequest(load_records_before_first_batch=True)
        call = clients.scheduler.SubscribeKvEvents(request)
        (load,) = await take(call, 1)
        assert load.load.load_only and load.load.max_total_num_tokens == 1024 and not load.events
        found: list[int] = []
        async with asyncio.timeout(20):
            while not set(block_hashes(ids, 4)) <= set(found):
                batch = await call.read()
                found += [event.stored.blocks[0].block_hash for event in batch.events if event.stored.blocks]
        call.cancel()


def test_wire_form_is_what_the_publisher_sends() -> None:
    """The decoder reads exactly the events of ``cache.events``."""
    payload = msgspec.msgpack.encode([1.5, [stored(9, medium="CPU_PINNED"), AllBlocksCleared()], 3])
    message = batch_message(Batch(4, payload, False))
    assert (message.timestamp, message.dp_rank, message.events[0].stored.tier) == (1.5, 3, common.KV_CACHE_TIER_HOST)
