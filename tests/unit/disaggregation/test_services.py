"""The bootstrap server and the engine-info service over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from sglang_lite.disaggregation import bootstrap_server, engine_info
from sglang_lite.disaggregation.topology import ROOM_SECONDS, Topology


async def _client(app: web.Application) -> TestClient[web.Request, web.Application]:
    client = TestClient(TestServer(app))
    await client.start_server()
    return client


def _rank(tp_rank: int, **changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "attn_tp_size": 2,
        "attn_tp_rank": tp_rank,
        "attn_cp_size": 1,
        "attn_cp_rank": 0,
        "attn_dp_size": 1,
        "attn_dp_rank": 0,
        "pp_size": 1,
        "pp_rank": 0,
        "system_dp_size": 1,
        "system_dp_rank": 0,
        "rank_ip": "10.0.0.1",
        "rank_port": 7000 + tp_rank,
        "page_size": 16,
        "kv_cache_dtype": "bfloat16",
        "load_balance_method": "follow_bootstrap_room",
    }
    return body | changes


def _query(dp: int, cp: int, tp: int, pp: int) -> str:
    return f"/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}"


async def test_topology_is_told_once_all_ranks_have_registered() -> None:
    client = await _client(bootstrap_server.build_app(Topology()))
    try:
        assert (await client.get(_query(-1, -1, -1, -1))).status == 503
        assert (await client.put("/route", json=_rank(0))).status == 200
        response = await client.get(_query(-1, -1, -1, -1))
        assert response.status == 503 and "1 of 2" in await response.text()
        response = await client.put("/route", json=_rank(1))
        assert (response.status, await response.text()) == (200, "OK")
        info = await (await client.get(_query(-1, -1, -1, -1))).json()
        assert (info["attn_tp_size"], info["dp_size"], info["page_size"]) == (2, 1, 16)
        assert info["kv_cache_dtype"] == "bfloat16" and info["follow_bootstrap_room"] is True
        assert "kv_layout" not in info
        found = await (await client.get(_query(0, 0, 1, 0))).json()
        assert (found["rank_ip"], found["rank_port"]) == ("10.0.0.1", 7001)
        assert (await client.get(_query(0, 0, 5, 0))).status == 404
        assert (await client.get(_query(0, -1, 1, 0))).status == 400
        assert (await client.get("/route?prefill_dp_rank=0")).status == 400
        assert (await client.post("/route")).status == 405
        health = await client.get("/health")
        assert (health.status, await health.text()) == (200, "OK")
    finally:
        await client.close()


async def test_ranks_that_do_not_fit_are_refused() -> None:
    client = await _client(bootstrap_server.build_app(Topology()))
    try:
        assert (await client.put("/route", json=_rank(0, kv_layout="a"))).status == 200
        assert (await client.put("/route", json=_rank(1, kv_layout="b"))).status == 400
        assert (await client.put("/route", json=_rank(1, kv_layout="a", decode_allocation_policy="x"))).status == 400
        assert (await client.put("/route", json=_rank(2, kv_layout="a"))).status == 400
        assert (await client.put("/route", json={"attn_tp_size": 1})).status == 400
        assert (await client.put("/route", data=b"{")).status == 400
        assert (await client.put("/route", json=_rank(0, kv_layout="b"))).status == 200, "a restart replaces"
    finally:
        await client.close()


async def test_rooms_are_told_until_they_are_too_old() -> None:
    now = [0.0]
    client = await _client(bootstrap_server.build_app(Topology(lambda: now[0])))
    try:
        for room, rank in ((5, 1), (6, 0)):
            await client.post("/register_dp_rank", json={"bootstrap_room": room, "dp_rank": rank})
            now[0] += 100.0
        response = await client.post("/query_dp_ranks", json={"bootstrap_rooms": [5, 6, 7]})
        assert await response.json() == {"6": 0}
        now[0] += ROOM_SECONDS
        response = await client.post("/query_dp_ranks", json={"bootstrap_rooms": [6]})
        assert await response.json() == {}
        assert (await client.post("/query_dp_ranks", json={"bootstrap_rooms": "x"})).status == 400
    finally:
        await client.close()


async def test_engine_info() -> None:
    client = await _client(engine_info.build_app(engine_info.EngineInfoTable()))

    async def put(rank: Any, session: str) -> int:
        info = {"session_id": session, "weights_info_dict": {"w": [1, 2]}}
        body = {"tp_rank": rank, "transfer_engine_info": info}
        return (await client.put("/register_transfer_engine_info", json=body)).status

    try:
        assert await put(0, "host:1") == 200
        response = await client.get("/get_transfer_engine_info?rank=0")
        expected = {"rank": 0, "remote_instance_transfer_engine_info": ["host:1", {"w": [1, 2]}]}
        assert await response.json() == expected
        assert await put(-1, "host:1") == 400
        assert await put(1, "") == 400
        assert await put("x", "host:1") == 400
        response = await client.get("/get_transfer_engine_info?rank=3")
        assert response.status == 404 and "3" in (await response.json())["detail"]
        for query in ("?rank=-1", "", "?rank=x"):
            assert (await client.get(f"/get_transfer_engine_info{query}")).status == 400
        assert await put(0, "host:2") == 200
        response = await client.get("/get_transfer_engine_info?rank=0")
        assert (await response.json())["remote_instance_transfer_engine_info"][0] == "host:2"
        assert await (await client.get("/health")).text() == "OK"
    finally:
        await client.close()


async def test_a_site_listens_between_start_and_stop() -> None:
    site = bootstrap_server.bootstrap_site("127.0.0.1", 0)
    await site.start()
    taken = bootstrap_server.bootstrap_site("127.0.0.1", site.port)
    with pytest.raises(OSError):
        await taken.start()
    await site.stop()
    await site.stop()
    await taken.start()
    assert taken.port == site.port
    await taken.stop()
