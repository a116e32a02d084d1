"""``--dp-aware``: the ranks of a server as workers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from sglang_lite.router.kv_events import KVEvents
from sglang_lite.router.options import RouterOptions, checked, parse_options
from sglang_lite.router.workers import MAX_WORKERS
from sglang_lite.types import StartupError
from tests.router.test_proxy import CHAT, CHAT_PATH, code_of, fixed
from tests.support.null_workers import NullWorker, router_over


def ranks_of(worker: NullWorker) -> list[Any]:
    return [msgspec.json.decode(body).get("data_parallel_rank") for _, _, body in worker.seen]


async def test_ranks_are_workers() -> None:
    three, one = NullWorker(dp_size=3), NullWorker(dp_size=1)
    async with router_over(three, one, dp_aware=True, policy="round_robin") as router:
        for _ in range(8):
            assert (await router.post(CHAT_PATH, CHAT))[0] == 200
        assert Counter(ranks_of(three)) == {0: 2, 1: 2, 2: 2} and Counter(ranks_of(one)) == {None: 2}
        assert msgspec.json.decode(three.seen[0][2]) == {**CHAT, "data_parallel_rank": ranks_of(three)[0]}
        listed = msgspec.json.decode((await router.get("/workers"))[2])
        urls = [worker["url"] for worker in listed["workers"]]
        assert urls == [*(f"{three.url}@{rank}" for rank in range(3)), one.url] and listed["total"] == 4
        assert len({worker["id"] for worker in listed["workers"]}) == 4
        metrics = (await router.get("/metrics"))[2].decode()
        assert f'smg_worker_health{{worker="{three.url}@2"}} 1.0' in metrics


async def test_a_server_gets_what_concerns_a_server_once() -> None:
    """Control calls, loads, and routes whose bodies name no rank."""
    worker = NullWorker(dp_size=3)
    async with router_over(worker, dp_aware=True) as router:
        answer = msgspec.json.decode((await router.post("/flush_cache", {}))[2])
        assert (answer["flushed_workers"], worker.count("/flush_cache")) == (1, 1)
        assert msgspec.json.decode((await router.get("/v1/loads"))[2])["total_workers"] == 1
        for path in ("/v1/rerank", "/v1/messages", "/v1/responses", "/v1/embeddings", "/tokenize"):
            assert (await router.post(path, {"input": "x"}))[0] == 200
            assert msgspec.json.decode(worker.seen[-1][2]) == {"input": "x"}, path


async def test_a_caller_may_name_the_rank() -> None:
    worker = NullWorker(dp_size=3)
    async with router_over(worker, dp_aware=True) as router:
        for given in ({"routed_dp_rank": 2}, {"data_parallel_rank": 2}):
            assert (await router.post("/generate", {"text": "x", **given}))[0] == 200
            assert msgspec.json.decode(worker.seen[-1][2]) == {"text": "x", **given}
        assert (await router.post("/generate", {"text": "x"}, headers={"x-data-parallel-rank": "1"}))[0] == 200
        assert ranks_of(worker)[-1] is None and worker.seen[-1][1]["x-data-parallel-rank"] == "1"
        assert (await router.post("/generate", {"text": "x", "data_parallel_rank": None}))[0] == 200
        assert ranks_of(worker)[-1] in (0, 1, 2)
        before = len(worker.seen)
        for wrong in ({"routed_dp_rank": 3}, {"data_parallel_rank": -1}, {"data_parallel_rank": "x"}):
            status, _, body = await router.post("/generate", {"text": "x", **wrong})
            assert (status, code_of(body), len(worker.seen)) == (400, "bad_request", before)


async def test_ranks_have_loads_and_breakers_of_their_own_and_one_health() -> None:
    worker = NullWorker(dp_size=2)
    async with router_over(worker, dp_aware=True, policy="round_robin", disable_retries=True) as router:
        server = router.context.registry.workers[worker.url]
        worker.answer = fixed(500)
        for _ in range(3):
            await router.post("/generate", {"text": "x", "data_parallel_rank": 0})
        assert [rank.breaker.state.name for rank in server.ranks] == ["OPEN", "CLOSED"]
        worker.answer = None
        for _ in range(3):
            assert (await router.post("/generate", {"text": "x"}))[0] == 200
            assert ranks_of(worker)[-1] == 1
        assert [rank.load for rank in server.ranks] == [0, 0]
        server.note_check(False, 1, 1)
        assert code_of((await router.post("/generate", {"text": "x"}))[2]) == "no_healthy_workers"
        server.note_check(True, 1, 1)
        assert (await router.post("/generate", {"text": "x"}))[0] == 200


async def test_a_rank_that_leaves_takes_its_server_along() -> None:
    worker, other = NullWorker(dp_size=2), NullWorker()
    async with router_over(worker, other, dp_aware=True) as router:
        registry = router.context.registry
        indexes = {target.index for target in registry.targets()}
        assert len(indexes) == 3
        listed = msgspec.json.decode((await router.get("/workers"))[2])["workers"]
        assert (await router.get(f"/workers/{listed[1]['id']}"))[0] == 200
        async with router.session.delete(f"{router.url}/workers/{listed[1]['id']}") as response:
            assert response.status == 202
        assert [target.url for target in registry.targets()] == [other.url]
        registry.add("http://new")
        assert len({target.index for target in registry.targets()}) == 2
        with pytest.raises(ValueError, match="too many"):
            registry.split(registry.workers[other.url], MAX_WORKERS)
        assert not registry.workers[other.url].ranks


async def test_without_the_option_a_server_is_one_worker() -> None:
    worker = NullWorker(dp_size=2)
    async with router_over(worker) as router:
        await router.post(CHAT_PATH, CHAT)
        assert worker.seen[-1][2] == msgspec.json.encode(CHAT)
        assert len(router.context.registry.targets()) == 1


async def test_a_rank_is_followed_by_its_own_events(tmp_path: Any) -> None:
    config = {"publisher": "zmq", "endpoint": f"ipc://{tmp_path}/e"}
    shown = {"publisher": "zmq", "block_size": 4, "dp_size": 2}
    async with router_over(dp_aware=True) as router:
        context = router.context
        server = context.registry.add("http://w")
        context.learn(server, {"dp_size": 2, "kv_events": shown, "kv_events_config": config})
        events: KVEvents = context.kv_events
        bits = [events._followed[rank.name].bits for rank in server.ranks]
        assert bits == [1, 2] and "http://w" not in events._followed


def test_flags() -> None:
    assert parse_options(["--dp-aware"]).dp_aware
    with pytest.raises(StartupError, match="--dp-aware"):
        checked(RouterOptions(dp_aware=True, prefill=(("http://p", 1),), decode=("http://d",)))
