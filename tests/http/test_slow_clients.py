"""Clients that send too slowly (no header, half a body) or no HTTP, and what they leave in the log."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.server import bodies
from sglang_lite.server.silent_clients import close_silent_clients, raise_file_limit
from tests.support.server import LocalServer

HALF = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"


async def test_half_a_body_is_not_waited_for(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LIMITS", replace(LIMITS, body_seconds=0.1))
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(HALF)
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()
    assert head.startswith(b"HTTP/1.1 408 ")
    assert server.context.requests_in_flight == 0


async def test_connections_without_a_header_are_closed() -> None:
    release = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.Response:
        await release.wait()
        return web.Response(text="done")

    server = web.Server(answer)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    closing = asyncio.create_task(close_silent_clients(server, 0.1))
    connections = [await asyncio.open_connection(host, port) for _ in range(3)]
    try:
        (silent, _), (half, half_writer), (whole, whole_writer) = connections
        half_writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-")
        whole_writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            assert await silent.read() == b""
            assert await half.read() == b""
            release.set()
            assert b"200 OK" in await whole.readuntil(b"\r\n\r\n")
    finally:
        closing.cancel()
        for _, writer in connections:
            writer.close()
        listener.close()
        await server.shutdown(0.1)


def test_the_file_limit_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = min(soft, 4096) - 1 if soft > 0 else 4095
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lower, hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > lower
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_broken_requests_leave_one_line_in_the_log(server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"secret" * 2000 + b"\r\n\r\n")
        async with asyncio.timeout(20):
            assert await reader.read()
    finally:
        writer.close()
    assert "Error handling request" in caplog.text
    assert "Traceback" not in caplog.text
    assert "secret" not in caplog.text
