"""Whatever a client does wrong, the reply is JSON: also where no route, or not even a request, was found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from sglang_lite.server.context import Phase, ServerContext
from sglang_lite.server.run import listening
from tests.support.fake_engine import FakeEngine


@asynccontextmanager
async def port() -> AsyncIterator[int]:
    context = ServerContext(FakeEngine(host="127.0.0.1", port=0))
    context.phase = Phase.READY
    async with listening(context):
        yield context.port


async def exchange(port: int, sent: bytes) -> tuple[int, bytes, bytes]:
    """Status, headers and body of the reply to some bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    body = await reader.readexactly(length)
    writer.close()
    return int(head.split()[1]), head.lower(), body


BROKEN = [
    (b"nonsense\r\n\r\n", 400),
    (b"GET /health HTTP/9.x\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400),
    (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", 400),
    (b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    (b"DELETE /generate HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    (b"POST /generate HTTP/1.1\r\nHost: x\r\nExpect: tea\r\nContent-Length: 2\r\n\r\n{}", 417),
]


@pytest.mark.parametrize(("sent", "status"), BROKEN)
async def test_errors_of_the_protocol_are_json(sent: bytes, status: int) -> None:
    async with port() as number:
        found, head, body = await exchange(number, sent)
        assert (found, b"content-type: application/json" in head) == (status, True)
        error = msgspec.json.decode(body)
        assert (error["object"], error["code"]) == ("error", status)
        assert error["message"]
        assert "\n" not in error["message"]


async def test_a_body_that_is_too_large_is_told_so_in_json() -> None:
    async with port() as number:
        sent = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        status, head, body = await exchange(number, sent + b"Content-Length: 99999999\r\n\r\n{")
        assert (status, b"content-type: application/json" in head) == (413, True)
        error = msgspec.json.decode(body)["error"]
        assert error["type"] == "request_too_large"
        assert "may have 33554432 bytes" in error["message"]


async def test_a_method_that_is_not_taken_is_told_which_are() -> None:
    async with port() as number:
        _, _, body = await exchange(number, b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n")
        assert msgspec.json.decode(body)["message"] == "Method Not Allowed: /v1/chat/completions takes POST"
