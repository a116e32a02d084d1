"""A decode server asks whatever bootstrap server a request names; a prefill server's is asked by anybody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from sglang_lite.disaggregation import bootstrap_client, http_site
from sglang_lite.disaggregation.base import KVFailed
from sglang_lite.disaggregation.bootstrap_server import bootstrap_site
from sglang_lite.disaggregation.http_site import HttpSite
from sglang_lite.types import TransferParams
from tests.support.session_pair import Pair, SiteThread

INFO = {"attn_tp_size": 1, "dp_size": 1, "page_size": 4, "kv_cache_dtype": "bfloat16", "kv_layout": "test layout"}
ADDRESS = {"rank_ip": "127.0.0.1", "rank_port": 1, "instance": "a" * 32}


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


class Strange:
    """A bootstrap server that answers what a test wants."""

    def __init__(self, info: Any, address: Any = ADDRESS, ranks: Any = None) -> None:
        self._answers = info, address, ranks
        app = web.Application()
        app.router.add_get("/route", self._route)
        app.router.add_post("/query_dp_ranks", self._ranks)
        self.site = SiteThread(HttpSite(app, "127.0.0.1", 0))

    async def _route(self, request: web.Request) -> web.Response:
        info, address, _ = self._answers
        return _response(info if request.query["target_tp_rank"] == "-1" else address)

    async def _ranks(self, request: web.Request) -> web.Response:
        del request
        return _response(self._answers[2])


def _response(answer: Any) -> web.Response:
    if isinstance(answer, web.Response):
        return answer
    return web.Response(body=answer if isinstance(answer, bytes) else json.dumps(answer).encode())


REPLICAS = INFO | {"dp_size": 2, "follow_bootstrap_room": False}


@pytest.mark.parametrize(
    ("info", "address", "ranks"),
    [
        (INFO | {"dp_size": 0}, ADDRESS, None),
        (INFO | {"attn_tp_size": 0}, ADDRESS, None),
        (INFO | {"attn_tp_size": 1 << 80}, ADDRESS, None),
        (b"\xff" * 9, ADDRESS, None),
        (b"[" * 100_000, ADDRESS, None),
        (REPLICAS, ADDRESS, {"9": [1]}),
        (REPLICAS, ADDRESS, [1]),
        (REPLICAS, ADDRESS, b"{"),
        (INFO, ADDRESS | {"rank_port": 1 << 40}, None),
        (INFO, ADDRESS | {"rank_ip": "\0"}, None),
        (INFO, ADDRESS | {"rank_ip": "x" * 10_000}, None),
        (INFO, ADDRESS | {"rank_ip": "\ud800"}, None),
    ],
)
def test_answers_that_are_none(pair: Pair, info: Any, address: Any, ranks: Any) -> None:
    """The request fails with a reason; it does not wait for the end of all its time."""
    _fails(pair, Strange(info, address, ranks))


def test_an_answer_without_end(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_client, "_MOST_BYTES", 1 << 16)
    assert "more than 65536 bytes" in _fails(pair, Strange(json.dumps(INFO).encode() + b" " * (1 << 20)))


def _fails(pair: Pair, strange: Strange) -> str:
    try:
        params = TransferParams("127.0.0.1", strange.site.site.port, 9)
        pair.open_decode(1, 1, [3], 4)  # of the pair's own prefill side; it is not touched
        pair.decode.worker.open(2, "strange", params, pages(4), 4, 0)
        failed = pair.decode.wait(2)
        assert isinstance(failed, KVFailed) and failed.status == 500 and failed.quiesced
        assert failed.message.count("Decode handshake failed"), failed.message
        pair.decode.worker.abort(1)
        return str(failed.message)
    finally:
        strange.site.close()


def pages(*numbers: int) -> Any:
    import numpy as np

    return np.array(numbers, dtype=np.int32)


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "-", "1.2.3.4.5", "::%", "%"])
def test_hosts_that_are_none(pair: Pair, host: str) -> None:
    pair.decode.worker.open(2, "strange", TransferParams(host, 8998, 9), pages(4), 4, 0)
    failed = pair.decode.wait(2)
    assert isinstance(failed, KVFailed) and "Decode handshake failed" in failed.message and failed.quiesced


async def test_a_body_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_site, "_BODY_SECONDS", 0.05)
    site = bootstrap_site("127.0.0.1", 0)
    await site.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(b"PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()
        assert site.server is not None
    finally:
        await site.stop()
    assert site.server is None
