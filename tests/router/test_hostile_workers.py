"""Workers that answer with what is no HTTP, or not what a server of models says: the client gets an error, nothing of
it, and no lease is left. Answers that are odd but right pass."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.router.test_proxy import code_of
from tests.support.null_workers import RouterUnderTest, router_over

INFO = json.dumps({"served_model_name": "m", "disaggregation_mode": "null"}).encode()
BODY = b'{"text":"x"}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class RawWorker:
    """Introduces itself, and answers requests with ``script`` and the end of the connection."""

    def __init__(self) -> None:
        self.script = b""
        self.requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                if b"/server_info" in head or b"/health" in head:
                    writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(INFO) + INFO)
                    continue
                self.requests += 1
                writer.write(self.script)
                await writer.drain()
                return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def raw_worker() -> AsyncIterator[tuple[RawWorker, RouterUnderTest]]:
    worker = RawWorker()
    server = await asyncio.start_server(worker.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, router_over(urls=(url,), retry_max_retries=1, disable_circuit_breaker=True) as router:
        yield worker, router


@pytest.mark.parametrize(
    "script",
    [
        b"",
        b"this is no HTTP\r\n\r\n",
        bytes(range(256)) * 20,
        b"HTTP/1.1 200 OK\r\n",
        *(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\n{}" % status for status in (0, 99, 302, 307, 999, 1000)),
        b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nraw",
        b"HTTP/1.1 304 X\r\n\r\n",
        HEAD + b"content-length: 100\r\n\r\n" + BODY,
        HEAD + b"content-length: 12\r\ncontent-length: 13\r\n\r\n" + BODY,
        HEAD + b"content-length: 12\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(BODY) + b"0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + BODY,
        HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(BODY),
        HEAD + b"x-a: " + b"a" * 100_000 + b"\r\ncontent-length: 12\r\n\r\n" + BODY,
        HEAD + b"x-a: b\r\n" * 20_000 + b"content-length: 12\r\n\r\n" + BODY,
        HEAD + b"x-a: a\0b\r\ncontent-length: 12\r\n\r\n" + BODY,
    ],
    ids=lambda script: repr(script[:40]),
)
async def test_what_is_no_answer(script: bytes) -> None:
    async with raw_worker() as (worker, router):
        worker.script = script
        for path, body in (("/generate", {"text": "A"}), ("/tokenize", {"prompt": "A"}), ("/flush_cache", {})):
            status, headers, answer = await router.post(path, body)
            assert (status, code_of(answer)) == (502, "upstream_unreachable"), path
            assert headers["x-router-error-code"] == "upstream_unreachable"
            router.context.registry.targets()[0].healthy = True
        assert router.context.leases.total == 0 and worker.requests == 3


@pytest.mark.parametrize(
    "script",
    [
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n"
        + HEAD
        + b"content-length: 12\r\n\r\n"
        + BODY,
        b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + BODY,
        HEAD + b"\r\n" + BODY,
        HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(BODY) + b"0\r\nx-a: b\r\n\r\n",
        HEAD + b"content-length: 12\r\nx-note: \xff\xfe\r\n\r\n" + BODY,
    ],
    ids=lambda script: repr(script[:40]),
)
async def test_what_is_odd_and_right(script: bytes) -> None:
    async with raw_worker() as (worker, router):
        worker.script = script
        status, headers, answer = await router.post("/generate", {"text": "A"})
        assert (status, headers["content-type"], answer) == (200, "application/json", BODY)


async def test_what_a_worker_packs_says_so() -> None:
    """Nobody asked for it, but a client that reads the header can unpack it."""
    packed = gzip.compress(BODY)
    async with raw_worker() as (worker, router):
        for head in (HEAD, EVENTS):
            worker.script = head + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed) + packed
            status, headers, answer = await router.post("/generate", {"text": "A"})
            assert (status, headers["content-encoding"], answer) == (200, "gzip", BODY)


async def test_a_stream_that_is_cut_at_any_byte_ends_with_an_error() -> None:
    whole = (
        EVENTS
        + b"transfer-encoding: chunked\r\n\r\n"
        + chunk(b"data: 1\n\n")
        + chunk(b"data: [DONE]\n\n")
        + b"0\r\n\r\n"
    )
    async with raw_worker() as (worker, router):
        for end in range(0, len(whole) - 1, 3):
            worker.script = whole[:end]
            status, _, answer = await router.post("/generate", {"text": "A", "stream": True})
            assert b'"upstream_unreachable"' in answer and status in (200, 502), end
            router.context.registry.targets()[0].healthy = True
        worker.script = whole
        assert (await router.post("/generate", {"text": "A"}))[2] == b"data: 1\n\ndata: [DONE]\n\n"
        assert router.context.leases.total == 0
