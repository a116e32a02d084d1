"""What errors of the router say, and what it says to a client that asks before it sends its body."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from sglang_lite.router.app import make_app
from sglang_lite.router.context import RouterContext
from sglang_lite.router.envelope import EnvelopeRunner
from sglang_lite.router.options import RouterOptions, checked
from tests.support.null_workers import NullWorker, router_over

CHAT_PATH = "/v1/chat/completions"


@asynccontextmanager
async def empty_router(**options: Any) -> AsyncIterator[int]:
    """The port of a router without workers, on connections as they are served."""
    app = make_app(RouterContext(checked(RouterOptions(worker_urls=(), **options))))
    runner = EnvelopeRunner(app, shutdown_timeout=0.1)  # a body that never comes is not waited for
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def exchange(port: int, head: bytes, body: bytes = b"") -> tuple[list[bytes], dict[str, str]]:
    """The heads that come back, and the error; ``body`` is sent once the first head said that it may be."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    heads = [await reader.readuntil(b"\r\n\r\n")]
    if heads[0].startswith(b"HTTP/1.1 100"):
        writer.write(body)
        heads.append(await reader.readuntil(b"\r\n\r\n"))
    length = int(heads[-1].lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    error: dict[str, str] = msgspec.json.decode(await reader.readexactly(length))["error"]
    writer.close()
    return heads, error


def head(*more: str, method: str = "POST", path: str = CHAT_PATH, length: int = 2) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *more, "", ""]
    return "\r\n".join(lines).encode()


async def test_a_body_is_asked_for_once_the_key_was_checked() -> None:
    waiting = "Expect: 100-continue"
    async with empty_router(api_key="right") as port:
        heads, error = await exchange(port, head(waiting))
        assert heads[0].startswith(b"HTTP/1.1 401 ") and b"connection: close" in heads[0].lower()
        assert "Authorization: Bearer KEY" in error["message"]
        heads, error = await exchange(port, head(waiting, "Authorization: Bearer right"), b"{}")
        assert [one.split()[1] for one in heads] == [b"100", b"503"]
        assert error["code"] == "no_healthy_workers"


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (head() + b"{}", ["no worker", "/workers"]),
        (head() + b"[]", ["JSON object"]),
        (head(length=9_999_999), ["1048576 bytes", "--max-payload-size"]),
        (head(path="/nowhere") + b"{}", ["docs/router.md"]),
        (head(method="DELETE") + b"{}", ["POST"]),
        (head(method="DELETE", path="/workers/nobody") + b"{}", ["'nobody'", "/workers"]),
    ],
)
async def test_an_error_says_what_is_wrong_and_what_to_do(sent: bytes, words: list[str]) -> None:
    async with empty_router() as port:
        _, error = await exchange(port, sent)
        assert [word for word in words if word not in error["message"]] == []


async def test_an_unknown_model_and_rank_are_told_what_there_is() -> None:
    worker = NullWorker()
    worker.info["dp_size"] = 2
    async with router_over(worker, dp_aware=True) as router:
        status, _, body = await router.post(CHAT_PATH, {"model": "nobody's", "messages": []})
        assert status == 404
        assert "/v1/models" in msgspec.json.decode(body)["error"]["message"]
        status, _, body = await router.post(CHAT_PATH, {"messages": [], "data_parallel_rank": 7})
        assert status == 400
        assert "rank '7'; there are 0, 1" in msgspec.json.decode(body)["error"]["message"]


@pytest.mark.parametrize(("options", "status"), [({}, 413), ({"api_key": "right"}, 401)], ids=["too-large", "no-key"])
async def test_a_packed_body_that_nobody_wants_is_not_unpacked(options: dict[str, Any], status: int) -> None:
    """A megabyte of it would be a gigabyte, with or without a key."""
    packer = zlib.compressobj(9, wbits=31)
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    async with empty_router(max_payload_size=1 << 17, **options) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head("Content-Encoding: gzip", length=len(packed)) + packed[: len(packed) // 2])
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in answer.lower()
        async with asyncio.timeout(9):  # it waits ten seconds for the rest of other bodies
            await reader.read()
        writer.close()
