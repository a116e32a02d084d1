"""SGLang's own router, the published ``sglang-router`` 0.3.2, in front of our servers (reference router.md 1 to 8).

It is a program of its own in an environment of its own: ``SGLANG_ROUTER`` names it, else the path is searched.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from tests.support.null_workers import NullWorker, router_over
from tests.support.server import LocalServer, free_port, greedy, local_server, read_event

PROGRAM = os.environ.get("SGLANG_ROUTER") or shutil.which("sglang-router")
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no sglang-router 0.3.2: .ci/run installs it; set SGLANG_ROUTER to its path"
)
CHAT = {"model": "chain", "messages": [{"role": "user", "content": "A"}], "max_tokens": 6, "temperature": 0}


class RustRouter:
    """The running program and a client for it."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        async with self.session.request(method, self.url + path, json=body) as response:
            return response.status, await response.read()

    async def ready(self, workers: int) -> None:
        """Wait until that many workers have registered."""
        async with asyncio.timeout(30):
            while True:
                try:
                    status, body = await self.call("GET", "/readiness")
                    if status == 200 and msgspec.json.decode(body)["healthy_workers"] == workers:
                        return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)


@asynccontextmanager
async def rust_router(log: Path, workers: int, *arguments: str) -> AsyncIterator[RustRouter]:
    """The program over workers that are there already, with ``workers`` of them registered."""
    assert PROGRAM is not None
    port, metrics = free_port(), free_port()
    words = ["launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    words += ["--worker-startup-check-interval", "1", "--log-level", "warn", *arguments]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(PROGRAM, *words, stdout=output, stderr=output)
    try:
        async with aiohttp.ClientSession() as session:
            router = RustRouter(f"http://127.0.0.1:{port}", session)
            await router.ready(workers)
            yield router
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def two_workers(model: Path) -> AsyncIterator[list[LocalServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(local_server(model, max_total_tokens=2048)) for _ in range(2)]


async def check_generate(router: RustRouter) -> None:
    status, body = await router.call("POST", "/generate", greedy("A", sampling={"max_new_tokens": 6}))
    assert status == 200, body
    reply = msgspec.json.decode(body)
    assert reply["text"] == "BCDABC" and reply["output_ids"] == list(b"BCDABC")
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


async def check_chat(router: RustRouter) -> None:
    status, body = await router.call("POST", "/v1/chat/completions", CHAT)
    assert status == 200, body
    reply = msgspec.json.decode(body)
    assert reply["choices"][0]["message"]["content"] == "BCDABC" and reply["usage"]["completion_tokens"] == 6
    status, body = await router.call("POST", "/v1/chat/completions", {**CHAT, "stream": True})
    assert status == 200, body
    events = [read_event(block) for block in body.split(b"\n\n") if block.strip()]
    assert events.pop() == "[DONE]"
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert text == "BCDABC" and events[-1]["choices"][0]["finish_reason"] == "length"


async def check_control(router: RustRouter, workers: list[LocalServer]) -> None:
    status, body = await router.call("GET", "/get_loads")
    loads = msgspec.json.decode(body)["workers"]
    assert status == 200 and {(load["worker"], load["load"]) for load in loads} == {(w.url, 0) for w in workers}
    cached = [(await worker.load())["num_used_tokens"] for worker in workers]
    status, body = await router.call("POST", "/flush_cache")
    assert status == 200, body
    for worker, before in zip(workers, cached, strict=True):
        assert (await worker.load())["num_used_tokens"] <= before
        reply = await worker.generate("A" * 40, sampling={"max_new_tokens": 1})
        assert reply["meta_info"]["cached_tokens"] == 0, "the cache was not emptied"


async def test_it_fronts_two_of_our_servers(chain_model: Path, tmp_path: Path) -> None:
    """Registration, /generate, chat whole and streamed, spreading, loads, flush."""
    async with two_workers(chain_model) as workers:
        urls = [worker.url for worker in workers]
        async with rust_router(tmp_path / "log", 2, "--policy", "round_robin", "--worker-urls", *urls) as router:
            status, body = await router.call("GET", "/workers")
            registered = msgspec.json.decode(body)["workers"]
            assert status == 200 and {entry["url"] for entry in registered} == set(urls)
            assert {entry["connection_mode"] for entry in registered} == {"HTTP"}
            status, body = await router.call("GET", "/v1/models")
            assert [entry["id"] for entry in msgspec.json.decode(body)["data"]] == ["chain"]
            await check_generate(router)
            await check_chat(router)
            for worker in workers:
                await worker.generate("A" * 40, sampling={"max_new_tokens": 1})
            for _ in range(4):
                await check_generate(router)
            await check_control(router, workers)
            assert (await router.call("POST", "/generate", {"sampling_params": {"top_p": 7}, "text": "A"}))[0] == 400


async def test_both_routers_send_pairs_the_same_fields(tmp_path: Path) -> None:
    """Prefill and decode workers cannot tell the two routers apart by what the bootstrap fields are."""
    one = NullWorker(disaggregation_mode="prefill", disaggregation_bootstrap_port=8998)
    other = NullWorker(disaggregation_mode="decode")

    async def answer(request: web.Request, data: bytes) -> web.StreamResponse:
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        )

    one.answer = other.answer = answer
    chat = {**CHAT, "model": "m"}
    async with router_over(one, other) as router:
        assert (await router.post("/v1/chat/completions", chat))[0] == 200
        ours = msgspec.json.decode(one.seen[-1][2])
        one.seen.clear()
        other.seen.clear()
        pools = ("--pd-disaggregation", "--prefill", one.url, "8998", "--decode", other.url)
        async with rust_router(tmp_path / "log", 2, *pools) as rust:
            status, body = await rust.call("POST", "/v1/chat/completions", chat)
            assert status == 200, body
        (theirs, same) = (
            [msgspec.json.decode(seen[2]) for seen in worker.seen if seen[0].startswith("/v1/chat")]
            for worker in (one, other)
        )
        assert theirs == same and len(theirs) == 1
        for name in ("bootstrap_host", "bootstrap_port", "messages", "temperature"):
            assert theirs[0][name] == ours[name], name
        assert {type(body["bootstrap_room"]) for body in (ours, theirs[0])} == {int}
