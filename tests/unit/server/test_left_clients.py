"""What the log says of clients that hang up."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import ClientError
from aiohttp.test_utils import TestClient, TestServer

from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.server.app import make_app
from sglang_lite.server.context import Phase, ServerContext
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
