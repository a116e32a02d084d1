"""Prefill and decode servers that speak gRPC, behind a router that they have registered with."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp.test_utils import TestServer

from sglang_lite.router.app import make_app
from sglang_lite.router.context import RouterContext
from sglang_lite.router.options import RouterOptions, checked
from tests.support.null_workers import RouterUnderTest
from tests.support.server import ServerProcess, free_port

SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def words(model: Path, role: str, router: str) -> list[str]:
    options = ["--model-path", str(model), "--served-model-name", "m", "--max-total-tokens", "2048"]
    options += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "tcp", "--router-url", router]
    options += ["--grpc-mode", "--smg-http-sidecar-port", str(free_port())]
    if role == "prefill":
        options += ["--disaggregation-bootstrap-port", str(free_port()), "--engine-info-bootstrap-port", "0"]
    return options


async def test_a_pair_over_grpc(chain_model: Path, tmp_path: Path) -> None:
    context = RouterContext(checked(RouterOptions(pd_disaggregation=True)))
    server = TestServer(make_app(context))
    await server.start_server()
    url = str(server.make_url("/")).rstrip("/")
    try:
        with ExitStack() as stack:
            sides = [
                stack.enter_context(ServerProcess(words(chain_model, role, url), tmp_path / role))
                for role in ("prefill", "decode")
            ]
            async with asyncio.timeout(90):
                while {worker.role for worker in context.registry.registered()} != {"prefill", "decode"}:
                    assert all(side.process.poll() is None for side in sides), [side.output for side in sides]
                    await asyncio.sleep(0.05)
            assert all(worker.is_grpc for worker in context.registry.registered())
            async with aiohttp.ClientSession() as session:
                await check(RouterUnderTest(context, server, session))
            assert context.leases.total == 0
    finally:
        await server.close()


async def check(router: RouterUnderTest) -> None:
    body: dict[str, Any] = {"text": "A", "sampling_params": SAMPLING}
    json = {"content-type": "application/json"}
    status, headers, got = await router.post("/generate", body, headers=json)
    assert (status, msgspec.json.decode(got)["text"]) == (200, "BCDA" * 3), got
    assert 0 <= int(headers["x-sgl-bootstrap-room"]) < 1 << 63
    assert headers["x-sgl-decode-url"].startswith("grpc://")
    _, _, got = await router.post("/generate", {**body, "stream": True}, headers=json)
    *events, done = got.removesuffix(b"\n\n").split(b"\n\n")
    assert (msgspec.json.decode(events[-1][6:])["text"], done) == ("BCDA" * 3, b"data: [DONE]")
    chat = {"model": "m", "messages": [{"role": "user", "content": "A"}], "max_tokens": 8, "temperature": 0}
    status, _, got = await router.post("/v1/chat/completions", chat, headers=json)
    assert status == 200 and msgspec.json.decode(got)["usage"]["completion_tokens"] > 0
    batch = {"text": ["A", "B"], "sampling_params": SAMPLING}
    _, _, got = await router.post("/generate", batch, headers=json)
    assert [result["text"] for result in msgspec.json.decode(got)] == ["BCDA" * 3, "CDAB" * 3]
    polled = msgspec.json.decode((await router.get("/poll_transfers"))[2])
    assert polled["pending_batches"] == 0
