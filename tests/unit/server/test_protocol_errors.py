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
async def port(**options: str) -> AsyncIterator[int]:
    context = ServerContext(FakeEngine(host="127.0.0.1", port=0, **options))
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


BODY = b'{"input_ids":[1],"sampling_params":{"max_new_tokens":1}}'


def asking(path: str, key: str, length: int = len(BODY)) -> bytes:
    """The head of a request whose client waits for leave to send the body."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", "Expect: 100-continue"]
    return "\r\n".join([*lines, "Content-Type: application/json", f"Content-Length: {length}", "", ""]).encode()


@pytest.mark.parametrize(
    ("path", "key", "length", "status"),
    [
        ("/generate", "wrong", len(BODY), 401),
        ("/nowhere", "wrong", len(BODY), 401),
        ("/nowhere", "right", len(BODY), 404),
        ("/generate", "right", 99_999_999, 413),
    ],
)
async def test_no_body_is_asked_for_that_would_be_refused(path: str, key: str, length: int, status: int) -> None:
    async with port(api_key="right") as number:
        found, head, _ = await exchange(number, asking(path, key, length))
        assert found == status
        assert b"connection: close" in head


async def test_a_body_is_asked_for_once_the_key_was_checked() -> None:
    async with port(api_key="right") as number:
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        for _ in range(2):  # on one connection
            writer.write(asking("/generate", "right"))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(BODY)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" not in head.lower()
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.close()
