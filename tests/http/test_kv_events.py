"""A server that publishes KV events: what a router that follows its replicas hears."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from sglang_lite.cache.block_hash import block_hashes
from tests.support.server import LocalServer, local_server

END_OF_REPLAY = b"\xff" * 8


async def replayed(endpoint: str) -> list[Any]:
    """Every batch that the replica at ``endpoint`` has published."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(endpoint)
        await dealer.send_multipart([b"", bytes(8)])
        batches: list[Any] = []
        while True:
            _, topic, number, payload = await asyncio.wait_for(dealer.recv_multipart(), 20)
            if number == END_OF_REPLAY:
                return batches
            assert (topic, int.from_bytes(number, "big")) == (b"kv", len(batches))
            batches.append(msgspec.msgpack.decode(payload))
    finally:
        context.destroy(linger=0)


async def events_until(endpoint: str, kind: str, count: int) -> tuple[list[dict[str, Any]], set[int]]:
    """The events, once there are ``count`` of a kind, and the ranks that the batches name."""
    async with asyncio.timeout(30):
        while True:
            batches = await replayed(endpoint)
            events = [event for _, found, _ in batches for event in found]
            if sum(event["type"] == kind for event in events) >= count:
                return events, {rank for _, _, rank in batches}


async def generate(server: LocalServer, rank: int, ids: list[int], **body: Any) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    call = {"input_ids": ids, "sampling_params": sampling, "routed_dp_rank": rank, **body}
    assert (await server.call("POST", "/generate", call)).status == 200


async def test_two_replicas_publish_what_they_cache(chain_model: Path, tmp_path: Path) -> None:
    replay = f"ipc://{tmp_path}/replay"
    published = {
        "publisher": "zmq",
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": replay,
        "topic": "kv",
    }
    async with local_server(
        chain_model, page_size=4, max_total_tokens=1024, dp_size=2, enable_metrics=True, kv_events_config=published
    ) as server:
        info = (await server.get("/server_info")).json()
        assert info["kv_events"] == {
            "publisher": "zmq",
            "endpoint_host": f"{tmp_path}/events",
            "endpoint_port_base": None,
            "topic": "kv",
            "block_size": 4,
            "dp_size": 2,
            "replay_endpoint_port_base": None,
        }
        await server.call("POST", "/flush_cache")  # what the warm-up left
        first, second = list(range(3, 11)), list(range(10, 22))
        await generate(server, 0, first)
        await generate(server, 1, second, cache_salt="pepper")
        for endpoint, rank, ids, salt in ((replay, 0, first, None), (f"{replay}_dp1", 1, second, "pepper")):
            hashes = block_hashes(ids, 4, salt or "")
            events, ranks = await events_until(endpoint, "BlockStored", len(hashes))
            stored = [event for event in events if event.get("block_hashes") in [[value] for value in hashes]]
            assert [event["block_hashes"] for event in stored] == [[value] for value in hashes]
            assert [event["parent_block_hash"] for event in stored] == [None, *hashes[:-1]]
            assert [token for event in stored for token in event["token_ids"]] == ids
            assert {event.get("cache_salt") for event in stored} == {salt}
            assert ranks == {rank}
        cleared = [event["type"] for event in (await events_until(replay, "AllBlocksCleared", 1))[0]]
        await server.call("POST", "/flush_cache")
        count = cleared.count("AllBlocksCleared") + 1
        events, _ = await events_until(replay, "AllBlocksCleared", count)
        assert events[-1] == {"type": "AllBlocksCleared"}
        metrics = (await server.get("/metrics")).text
        assert 'sglang:kv_event_batches_dropped_total{dp_rank="1"' in metrics
        assert 'sglang:kv_events_total{dp_rank="0"' in metrics


async def test_no_events_without_the_option(server: LocalServer) -> None:
    assert (await server.get("/server_info")).json()["kv_events"] is None
    assert "sglang:kv_event" not in (await server.get("/metrics")).text
