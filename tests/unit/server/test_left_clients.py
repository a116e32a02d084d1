"""Clients that hang up, and clients that do not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientError
from aiohttp.test_utils import TestClient, TestServer

from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.server.app import make_app
from sglang_lite.server.context import Phase, ServerContext
from sglang_lite.server.run import listening
from tests.support.fake_engine import FakeEngine, snapshot


def failing(error: Exception) -> Any:
    def script(request: GenerateRequest) -> list[GenerationOutput | Exception]:
        return [snapshot(request, "h"), error]

    return FakeEngine(script)


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        # As aiohttp's writer raises when the connection is lost between two events.
        pytest.param(ConnectionResetError("Cannot write to closing transport"), 0, id="the client left"),
        pytest.param(ZeroDivisionError("ours"), 1, id="a fault of ours"),
    ],
)
async def test_a_write_that_fails_leaves_no_traceback(
    error: Exception, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    context = ServerContext(failing(error))
    context.phase = Phase.READY
    async with TestClient(TestServer(make_app(context))) as client:
        try:
            reply = await client.post("/generate", json={"text": "A", "stream": True})
            await reply.read()
        except ClientError:
            pass  # the stream was cut, as it should be
    assert len([record for record in caplog.records if record.exc_info]) == lines


async def test_a_connection_without_another_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_lite.server.run.LIMITS", replace(LIMITS, idle_seconds=0.1))
    engine: Any = FakeEngine(host="127.0.0.1", port=0)
    context = ServerContext(engine)
    context.phase = Phase.READY
    async with listening(context):
        reader, writer = await asyncio.open_connection("127.0.0.1", context.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 200"), "read to its end: the server closed it"
        writer.close()
