"""Choice by KV events: real publishers and caches, gaps and restarts, a server with a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.cache import PagePool, RadixCache
from sglang_lite.cache.block_hash import block_hashes
from sglang_lite.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventLog
from sglang_lite.configuration.kv_events import KVEventsConfig
from sglang_lite.engine.kv_publisher import KVEventPublisher
from sglang_lite.router import kv_follow
from sglang_lite.router.kv_follow import Follower
from sglang_lite.router.kv_index import BlockIndex, PromptHasher, token_bytes
from sglang_lite.router.kv_source import Source, parse_endpoints, sources_of
from sglang_lite.router.kv_wire import Change, WrongEventsError, read_batch
from sglang_lite.types import StartupError
from tests.support.null_workers import NullWorker, RouterUnderTest, router_over
from tests.support.server import local_server

PAGE = 4


def hashes_of(ids: list[int], size: int, salt: str = "") -> list[int]:
    packed = token_bytes(ids)
    assert packed is not None
    return list(PromptHasher(size).hashes(packed, salt))


def test_hashes_are_those_of_the_contract() -> None:
    """C923."""
    assert hashes_of([1, 2, 3, 4], 4) == [-3488128144981237669]
    assert hashes_of([1, 2, 3, 4, 5], 4) == [-3488128144981237669], "an incomplete page is in no cache"
    assert hashes_of([10, 20, 30, 40, 50, 60, 70, 80], 2) == [
        978178666101069530,
        -895308556211281782,
        -8033692805846017938,
        835415944263129316,
    ]
    assert hashes_of([], 4) == [] and token_bytes([-1]) is None and token_bytes([2**32]) is None


@given(st.lists(st.integers(0, 5), max_size=200), st.integers(1, 5), st.sampled_from(["", "salt"]))
def test_hashes_are_those_of_the_workers(ids: list[int], size: int, salt: str) -> None:
    hasher, whole = PromptHasher(size), ids[: len(ids) - len(ids) % size]
    packed = token_bytes(ids)
    assert packed is not None
    for _ in range(2):  # the second time from memory
        assert list(hasher.hashes(packed, salt)) == block_hashes(whole, size, salt)


Act = tuple[str, int, list[int]]
KINDS = st.sampled_from(["store", "remove", "clear"])
ACTS = st.tuples(KINDS, st.integers(0, 2), st.lists(st.integers(0, 9), max_size=6))


@given(st.lists(ACTS, max_size=40), st.lists(st.integers(0, 9), max_size=6), st.integers(0, 7))
def test_the_index_against_sets(acts: list[Act], chain: list[int], sources: int) -> None:
    index, model = BlockIndex(12), [set[int]() for _ in range(3)]
    assert [index.open() for _ in model] == [0, 1, 2]
    for act, slot, hashes in acts:
        if act == "clear":
            index.clear(slot)
            model[slot].clear()
        elif act == "remove":
            index.remove(slot, hashes)
            model[slot] -= set(hashes)
        else:
            took_all = index.store(slot, hashes)
            for value in hashes:
                if sum(map(len, model)) < 12 or value in model[slot]:
                    model[slot].add(value)
                else:
                    assert not took_all
                    break
            else:
                assert took_all
        assert index.size == sum(map(len, model)) <= 12
        assert [index.blocks(slot) for slot in range(3)] == [len(own) for own in model]
    depths = {}
    for slot, own in enumerate(model):
        depth = next((number for number, value in enumerate(chain) if value not in own), len(chain))
        if sources >> slot & 1 and depth:
            depths[slot] = depth
    best = max(depths.values(), default=0)
    assert index.match(chain, sources) == (best, sum(1 << slot for slot, depth in depths.items() if depth == best))


def test_events_come_as_maps_and_as_arrays() -> None:
    stored = BlockStored(block_hashes=[1, 2], parent_block_hash=None, token_ids=[5] * 8, block_size=4, lora_id=None)
    maps = [stored, BlockRemoved(block_hashes=[1]), AllBlocksCleared(), BlockRemoved(block_hashes=[1], medium="DISK")]
    arrays = [
        ["BlockStored", [1, 2**64 - 1], None, [5] * 8, 4, None, "GPU"],
        ["BlockStored", [7], 1, [5] * 4, 4],
        ["BlockRemoved", [1]],
        ["AllBlocksCleared"],
        ["BlockStored", [9], 1, [5] * 4, 4, None, "CPU_PINNED"],
    ]
    cleared = Change("cleared", [])
    assert read_batch(msgspec.msgpack.encode([1.0, maps, 0])) == [
        Change("stored", [1, 2]),
        Change("removed", [1]),
        cleared,
    ]
    assert read_batch(msgspec.msgpack.encode([1.0, arrays])) == [
        Change("stored", [1, -1]),
        Change("stored", [7]),
        Change("removed", [1]),
        cleared,
    ]
    for wrong in (b"", b"\xc1", msgspec.msgpack.encode([1.0, [["Other"]]]), msgspec.msgpack.encode([1.0, [3]])):
        with pytest.raises(WrongEventsError):
            read_batch(wrong)
    with pytest.raises(WrongEventsError, match="65537 hashes"):
        read_batch(msgspec.msgpack.encode([1.0, [["BlockRemoved", [0] * 65_537]]]))


@settings(max_examples=200)
@given(
    st.lists(st.tuples(KINDS, st.integers(0, 5)), max_size=30),
    st.lists(st.sampled_from(["come", "lost", "twice", "broken", "again"]), max_size=30),
    st.booleans(),
)
def test_a_follower_never_believes_what_is_not_so(
    acts: list[tuple[str, int]], fates: list[str], restarts: bool
) -> None:
    """Against the cache itself: what is believed is there, and when it is complete, nothing else is."""
    index = BlockIndex(100)
    follower, truth, number = Follower(index, index.open()), set[int](), 0
    for place, (act, value) in enumerate([("clear", 0), *acts]):
        if restarts and place == len(acts) // 2:
            number, act = 0, "clear"
            follower.reset()  # the connection was a new one
        if act == "clear":
            truth.clear()
            change = Change("cleared", [])
        elif act == "store":
            truth.add(value)
            change = Change("stored", [value])
        else:
            truth.discard(value)
            change = Change("removed", [value])
        fate = fates[place % len(fates)] if fates else "come"
        if fate != "lost":
            follower.take(number, None if fate == "broken" else [change])
        if fate == "twice":
            follower.take(number, [change])
        if fate == "again" and number > 1:
            follower.take(number - 1, [Change("stored", [99])])
        number += 1
        if fate not in ("lost", "broken"):
            known = {hash_ for hash_ in range(100) if index.match([hash_], 1)[0]}
            assert known <= truth
            assert not follower.complete or known == truth


def test_where_workers_publish() -> None:
    shown = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "kv",
        "block_size": 16,
        "dp_size": 2,
        "replay_endpoint_port_base": 6000,
    }
    first = Source("tcp://w:5557", "tcp://w:6000", "kv", 16, "default", 0)
    second = Source("tcp://w:5558", "tcp://w:6001", "kv", 16, "default", 1)
    assert sources_of({"kv_events": shown}, "w", None) == [first, second]
    config = {"publisher": "zmq", "endpoint": "ipc:///e", "format": "dynamo"}
    info = {"kv_events": {**shown, "dp_size": 1}, "kv_events_config": config}
    assert sources_of(info, "w", None) == [Source("ipc:///e", None, "", 16, "dynamo", 0)]
    there = {"kv_events": {**shown, "dp_size": 1}, "kv_events_config": {**config, "endpoint": "tcp://router:1"}}
    assert sources_of(there, "w", None) == [], "that publisher connects to somebody else"
    assert sources_of(there, "::1", ("tcp://*:7", None)) == [Source("tcp://[::1]:7", None, "", 16, "dynamo", 0)]
    assert sources_of({"page_size": 4}, "w", ("tcp://h:7", "tcp://h:8")) == [Source("tcp://h:7", "tcp://h:8", "", 4)]
    for nothing in ({}, {"kv_events": None, "page_size": 4}, {"kv_events": {**shown, "block_size": 0}}):
        assert sources_of(nothing, "w", None) == []
    assert sources_of({"kv_events": {**shown, "endpoint_port_base": 65535}}, "w", None) == []
    assert parse_endpoints(["http://a/=tcp://a:1,tcp://a:2", "http://b=ipc://x"]) == {
        "http://a": ("tcp://a:1", "tcp://a:2"),
        "http://b": ("ipc://x", None),
    }
    for wrong in ("http://a", "=tcp://a:1", "http://a=http://a:1", "a=tcp://a:1"):
        with pytest.raises(StartupError, match="--kv-events-endpoints"):
            parse_endpoints([wrong])


class CachedWorker(NullWorker):
    """A worker with a real cache and a real publisher: it holds what ``hold`` says, until ``drop``."""

    def __init__(self, folder: Path, name: str, **options: Any) -> None:
        self.config = KVEventsConfig(
            "zmq", f"ipc://{folder}/{name}", replay_endpoint=f"ipc://{folder}/{name}-replay", **options
        )
        super().__init__(
            page_size=PAGE,
            kv_events=self.config.describe(PAGE, 1),
            kv_events_config=msgspec.to_builtins(self.config),
        )
        self.start()

    def start(self) -> None:
        self.log = KVEventLog()
        self.cache = RadixCache(PagePool(4096, PAGE), events=self.log)
        self.publisher = KVEventPublisher(self.config)

    def hold(self, ids: list[int], salt: str = "") -> None:
        namespace = f"{len(salt)}:{salt}" if salt else ""
        own = self.cache.pool.allocate(len(ids) // PAGE)
        packed = np.array(ids[: len(own) * PAGE], dtype=np.int32)
        self.cache.pool.release(self.cache.insert(packed, own, namespace).duplicates(own))
        self.publisher.take(self.log.drain())

    def drop(self) -> None:
        self.cache.flush()
        self.publisher.take(self.log.drain())


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[CachedWorker]]:
    made = [CachedWorker(tmp_path, "a"), CachedWorker(tmp_path, "b")]
    yield made
    for worker in made:
        worker.publisher.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def knows(router: RouterUnderTest, worker: CachedWorker, blocks: int) -> None:
    """Wait until the router has heard of so many blocks, and of all of them."""
    one, events = router.context.registry.workers[worker.url], router.context.kv_events
    await until(lambda: events.blocks(one) == blocks and events.is_complete(one))


async def asked(router: RouterUnderTest, body: dict[str, Any], path: str = "/generate") -> str:
    status, _, answer = await router.post(path, body)
    assert status == 200
    return str(msgspec.json.decode(answer)["worker"])


async def test_the_worker_that_holds_the_prompt_gets_it(pair: list[CachedWorker]) -> None:
    """What it holds, not what it was sent: held before the router came, put in since, dropped."""
    first, second = pair
    early, late = list(range(100, 140)), list(range(200, 240))
    first.hold(early)
    async with router_over(*pair) as router:
        await knows(router, first, 10)
        assert {await asked(router, {"input_ids": early}) for _ in range(4)} == {first.url}
        second.hold(late)
        await knows(router, second, 10)
        assert {await asked(router, {"input_ids": [*late, 7]}) for _ in range(4)} == {second.url}
        assert {await asked(router, {"prompt": late}, "/v1/completions") for _ in range(4)} == {second.url}
        policy: Any = router.context.policies["regular"]
        assert (policy.reason, policy.overlap) == ("match", 10)
        assert policy._tree.size == 0, "what is known needs no guess"
        second.drop()
        await knows(router, second, 0)
        assert {await asked(router, {"input_ids": late}) for _ in range(4)} == {first.url, second.url}
        assert (policy.reason, policy.overlap) == ("load", 0)
        metrics = (await router.get("/metrics"))[2]
        assert b'sgl_router_overlap_blocks_bucket{le="8.0"} 4.0' in metrics
        assert b"sgl_router_overlap_blocks_count 16.0" in metrics


async def test_what_hashes_do_not_tell_is_left_to_the_tree(pair: list[CachedWorker]) -> None:
    first, second = pair
    ids = list(range(300, 340))
    first.hold(ids)
    second.hold(ids, "pepper")
    async with router_over(*pair) as router:
        await knows(router, first, 10)
        await knows(router, second, 10)
        assert {await asked(router, {"input_ids": ids}) for _ in range(3)} == {first.url}
        assert {await asked(router, {"input_ids": ids, "cache_salt": "pepper"}) for _ in range(3)} == {second.url}
        policy: Any = router.context.policies["regular"]
        for number, other in enumerate(({"extra_key": "x"}, {"lora_path": "x"}, {"input_ids": [ids, ids]})):
            await asked(router, {"input_ids": ids, **other, "model": "m"})
            assert policy.overlap is None and policy._tree.size > number, "sent is guessed to be held"
        await asked(router, {"text": "x" * 40})
        assert policy.overlap is None, "no tokenizer, no tokens"


async def test_a_worker_that_publishes_nothing_is_guessed_about(pair: list[CachedWorker]) -> None:
    first, silent = pair[0], NullWorker()
    ids, other = list(range(100, 140)), list(range(500, 540))
    async with router_over(first, silent) as router:
        await knows(router, first, 0)
        while await asked(router, {"input_ids": other}) != silent.url:
            pass
        assert {await asked(router, {"input_ids": other}) for _ in range(4)} == {silent.url}
        first.hold(ids)
        await knows(router, first, 10)
        assert {await asked(router, {"input_ids": ids}) for _ in range(4)} == {first.url}
    async with router_over(pair[1], disable_kv_events=True) as router:
        assert not router.context.kv_events.is_active


async def test_an_address_from_the_command_line(tmp_path: Path) -> None:
    """For a server that does not say where it publishes."""
    worker = CachedWorker(tmp_path, "a")
    endpoints = f"{worker.config.endpoint},{worker.config.replay_endpoint}"
    worker.info.update(kv_events=None, kv_events_config=None)
    await worker.server.start_server()
    try:
        async with router_over(kv_events_endpoints=(f"{worker.url}={endpoints}",)) as router:
            assert (await router.post("/workers", {"url": worker.url}))[0] == 202
            await router.registered(1)
            worker.hold(list(range(40)))
            await knows(router, worker, 10)
            await asked(router, {"input_ids": list(range(40))})
            policy: Any = router.context.policies["regular"]
            assert (policy.reason, policy.overlap) == ("match", 10)
    finally:
        worker.publisher.close()
        await worker.server.close()


async def test_the_router_answers_while_it_reads_a_long_replay(pair: list[CachedWorker]) -> None:
    first = pair[0]
    for number in range(900):
        first.hold([number * 4 + place for place in range(4)])
    async with router_over(first) as router:
        one, events = router.context.registry.workers[first.url], router.context.kv_events
        turns = 0
        while events.blocks(one) != 900:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 900 / 32 / 2, "one turn would be a standstill"


async def test_a_new_publisher_starts_from_nothing(pair: list[CachedWorker]) -> None:
    first = pair[0]
    first.hold(list(range(40)))
    async with router_over(first) as router:
        await knows(router, first, 10)
        first.publisher.close()
        await until(lambda: router.context.kv_events.blocks(router.context.registry.workers[first.url]) == 0)
        first.start()
        first.hold(list(range(12)))
        await knows(router, first, 3)


async def test_workers_that_leave_take_their_blocks_along(pair: list[CachedWorker]) -> None:
    for worker in pair:
        worker.hold(list(range(40)))
    async with router_over(*pair) as router:
        await knows(router, pair[0], 10)
        await knows(router, pair[1], 10)
        index = router.context.kv_events.index
        router.context.registry.remove(pair[0].url)
        await until(lambda: index.size == 10)
        again = router.context.registry.add(pair[0].url)
        router.context.learn(again, pair[0].info)
        await knows(router, pair[0], 10)
        assert index.size == 20


async def test_memory_is_bounded(pair: list[CachedWorker]) -> None:
    first = pair[0]
    async with router_over(first, kv_events_max_blocks=8) as router:
        await knows(router, first, 0)
        first.hold(list(range(80)))
        worker, events = router.context.registry.workers[first.url], router.context.kv_events
        await until(lambda: events.blocks(worker) == 8 and not events.is_complete(worker))
        first.drop()
        await knows(router, first, 0)


class Relay:
    """Passes batches of a publisher on, but for those that it is told to lose."""

    def __init__(self, source: str, target: str) -> None:
        self._context = zmq.asyncio.Context()
        self._from, self._to = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        self._from.setsockopt(zmq.SUBSCRIBE, b"")
        self._from.connect(source)
        self._to.bind(target)
        self.loses = False
        self.lost = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            frames = await self._from.recv_multipart()
            if self.loses:
                self.lost += 1
            else:
                await self._to.send_multipart(frames)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)


@pytest.mark.parametrize("kept", [10_000, 2])
async def test_what_was_missed_is_asked_for(tmp_path: Path, kept: int) -> None:
    """Three batches are lost on the way; where the publisher has them no longer, nothing wrong is believed."""
    worker = CachedWorker(tmp_path, "a", buffer_steps=kept)
    relay = Relay(worker.config.endpoint, f"ipc://{tmp_path}/relay")
    worker.info["kv_events_config"] = {**worker.info["kv_events_config"], "endpoint": f"ipc://{tmp_path}/relay"}
    try:
        async with router_over(worker) as router:
            one, events = router.context.registry.workers[worker.url], router.context.kv_events
            await knows(router, worker, 0)
            number = 0

            async def comes_through() -> None:
                nonlocal number
                before = events.blocks(one)
                while events.blocks(one) == before:  # until the relay is subscribed
                    worker.hold(list(range(1000 * number, 1000 * number + 4)))
                    number += 1
                    await asyncio.sleep(0.005)

            await asyncio.wait_for(comes_through(), 10)
            await knows(router, worker, number)
            relay.loses = True
            worker.drop()
            worker.hold(list(range(500_000, 500_012)))
            worker.hold(list(range(600_000, 600_012)))
            await until(lambda: relay.lost == 3)
            relay.loses = False
            worker.hold(list(range(700_000, 700_012)))
            if kept == 2:
                await until(lambda: not events.is_complete(one) and events.blocks(one) == 6)
                assert await asked(router, {"input_ids": list(range(700_000, 700_012))}) == worker.url
                worker.drop()
                await knows(router, worker, 0)
            else:
                await knows(router, worker, 9)
    finally:
        await relay.close()
        worker.publisher.close()


async def test_without_a_replay_a_source_is_complete_from_its_next_beginning(tmp_path: Path) -> None:
    worker = CachedWorker(tmp_path, "a")
    worker.info["kv_events_config"] = {**worker.info["kv_events_config"], "replay_endpoint": None}
    try:
        async with router_over(worker) as router:
            one, events = router.context.registry.workers[worker.url], router.context.kv_events
            async with asyncio.timeout(10):
                while not events.blocks(one):
                    worker.hold(list(range(worker.publisher.batches * 100, worker.publisher.batches * 100 + 4)))
                    await asyncio.sleep(0.005)
            assert not events.is_complete(one)
            worker.drop()
            await knows(router, worker, 0)
            worker.hold(list(range(8)))
            await knows(router, worker, 2)
    finally:
        worker.publisher.close()


async def test_a_replay_that_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_follow, "_REPLAY_SECONDS", 0.02)
    worker = CachedWorker(tmp_path, "a")
    worker.info["kv_events_config"] = {
        **worker.info["kv_events_config"],
        "replay_endpoint": f"ipc://{tmp_path}/nobody",
    }
    try:
        async with router_over(worker) as router:
            one, events = router.context.registry.workers[worker.url], router.context.kv_events
            async with asyncio.timeout(10):
                while not events.is_complete(one):
                    worker.hold(list(range(8)))
                    worker.drop()
                    await asyncio.sleep(0.01)
    finally:
        worker.publisher.close()


async def test_texts_and_conversations_over_a_real_server(chain_model: Path, tmp_path: Path) -> None:
    """The router's tokens are the server's: every page of a repeated prompt is found."""
    published = {"publisher": "zmq", "endpoint": f"ipc://{tmp_path}/e", "replay_endpoint": f"ipc://{tmp_path}/r"}
    options = {"tokenizer_path": str(chain_model), "worker_startup_check_interval": 0.02}
    async with (
        local_server(chain_model, page_size=PAGE, max_total_tokens=4096, kv_events_config=published) as server,
        router_over(**options) as router,  # type: ignore[arg-type]
    ):
        assert (await router.post("/workers", {"url": server.url}))[0] == 202
        await router.registered(1)
        (worker,) = router.context.registry.registered()
        events, policy = router.context.kv_events, router.context.policies["regular"]
        await until(lambda: events.is_complete(worker))
        sampling, json = {"temperature": 0, "max_tokens": 1}, {"content-type": "application/json"}
        conversation = [{"role": "user", "content": "DEFABCDEFABCDEFABC"}]
        for path, body in (
            ("/generate", {"text": "ABCDEFABCDEFABCDEFABCDEF", "sampling_params": {"max_new_tokens": 1}}),
            ("/v1/completions", {"prompt": "BCDEFABCDEFABCDEFABCDEFA", **sampling}),
            ("/v1/chat/completions", {"messages": conversation, **sampling}),
        ):
            for _ in range(2):
                before = events.blocks(worker)
                status, _, answer = await router.post(path, {"model": "chain", **body}, headers=json)
                assert status == 200, answer
                if policy.overlap == 0:
                    await until(lambda before=before: events.blocks(worker) != before)
            reply = msgspec.json.decode(answer)
            count = reply["meta_info"]["prompt_tokens"] if path == "/generate" else reply["usage"]["prompt_tokens"]
            assert count >= 2 * PAGE
            assert policy.overlap == count // PAGE
