"""Streams over gRPC with a scripted engine: failures behind the first message, readers that stop, TLS, refusals."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from sglang_lite.frontend.request import FinishReason, GenerateRequest
from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2 as pb
from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2_grpc
from sglang_lite.rpc.generation import exact
from sglang_lite.rpc.server import listening
from sglang_lite.rpc.status import code_of
from sglang_lite.server.context import Phase, ServerContext
from sglang_lite.types import RequestError, StartupError
from tests.support.fake_engine import FakeEngine, snapshot
from tests.support.server import free_port
from tests.unit.server.test_security import make_certificate

STREAM = pb.TextGenerateRequest(text="A", options={"stream": True, "request_id": "r"})


def engine(script: Any, **options: Any) -> FakeEngine:
    return FakeEngine(script, grpc_mode=True, port=0, smg_http_sidecar_port=free_port(), **options)


def ready(fake: FakeEngine) -> ServerContext:
    context = ServerContext(fake)  # type: ignore[arg-type]
    context.phase = Phase.READY
    return context


def stub_of(channel: Any) -> Any:
    return sglang_pb2_grpc.SglangServiceStub(channel)  # type: ignore[no-untyped-call]


async def test_a_failure_behind_the_first_message_is_a_message_and_a_status() -> None:
    def fails(request: GenerateRequest) -> list[Any]:
        return [snapshot(request, "h"), RequestError("the core is gone", status=500)]

    context = ready(engine(fails))
    async with listening(context), grpc.aio.insecure_channel(f"127.0.0.1:{context.port}") as channel:
        call = stub_of(channel).TextGenerate(STREAM)
        messages = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for message in call:
                messages.append(message)
        assert [message.WhichOneof("body") for message in messages] == ["chunk", "error"]
        assert (messages[1].error.message, messages[1].error.code) == ("the core is gone", "INTERNAL")
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "the core is gone")
    assert context.requests_in_flight == 0


async def test_a_fault_of_ours_tells_its_type_alone() -> None:
    def breaks(request: GenerateRequest) -> list[Any]:
        return [ValueError("a secret")]

    context = ready(engine(breaks))
    async with listening(context), grpc.aio.insecure_channel(f"127.0.0.1:{context.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub_of(channel).TextGenerate(STREAM)))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")
    assert "ValueError" in (caught.value.details() or "")


@pytest.mark.parametrize("sign", ["\u00e9", "%", "x", "\n", "\U0001f600", "\ud800"])
async def test_long_refusals_arrive(sign: str) -> None:
    """Status lines have little room, and signs outside of ASCII take nine times their place there."""

    def refuses(request: GenerateRequest) -> list[Any]:
        return [RequestError(f"too long: {sign * 20_000}", status=400)]

    context = ready(engine(refuses))
    async with listening(context), grpc.aio.insecure_channel(f"127.0.0.1:{context.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub_of(channel).TextGenerate(STREAM)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = caught.value.details() or ""
    assert details.startswith("too long: ") and details.endswith("...") and len(details) > 150
    assert dict(caught.value.trailing_metadata() or ())["x-sgl-status"] == "400"


async def test_a_reader_that_stops_loses_its_call_and_frees_the_engine() -> None:
    def endless(request: GenerateRequest) -> list[Any]:
        texts = ["x" * (300_000 * step) for step in range(1, 60)]
        end = snapshot(request, "", FinishReason("length", length=1))
        return [*(replace(end, text=text, finish_reason=None) for text in texts), end]

    fake = engine(endless, stream_stall_timeout=0.3)
    context = ready(fake)
    async with listening(context), grpc.aio.insecure_channel(f"127.0.0.1:{context.port}") as channel:
        call = stub_of(channel).TextGenerate(STREAM)
        await anext(aiter(call))
        async with asyncio.timeout(10):
            await context.idle.wait()
        assert fake.closed == ["r"]
        call.cancel()


async def test_admission_and_warming() -> None:
    fake = engine(lambda request: [])
    context = ServerContext(fake)  # type: ignore[arg-type]
    async with listening(context), grpc.aio.insecure_channel(f"127.0.0.1:{context.port}") as channel:
        stub = stub_of(channel)
        health = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, health.message) == (False, context.phase.value)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.TextGenerate(STREAM)))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert fake.started == []


async def test_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "first")
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    context = ready(engine(lambda request: [snapshot(request, "hi", FinishReason("length", length=2))], **files))
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    async with listening(context), grpc.aio.secure_channel(f"localhost:{context.port}", credentials) as channel:
        (message,) = [item async for item in stub_of(channel).TextGenerate(pb.TextGenerateRequest(text="A"))]
        assert message.complete.text == "hi"
    refused = ready(engine(lambda request: [], **files, ssl_keyfile_password="x"))
    with pytest.raises(StartupError, match="--ssl-keyfile-password"):
        async with listening(refused):
            pass


async def test_an_occupied_port_frees_the_sidecar() -> None:
    first = ready(engine(lambda request: []))
    async with listening(first):
        port = free_port()
        second = FakeEngine(grpc_mode=True, port=first.port, smg_http_sidecar_port=port)
        with pytest.raises(StartupError, match="for gRPC"):
            async with listening(ready(second)):
                pass
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("value", [0.1, 0.7, 0.95, 1.0, 1e-5, 2.0, 0.30000001192092896])
def test_numbers_are_those_that_the_client_wrote(value: float) -> None:
    assert exact(pb.SamplingParams(top_p=value).top_p) == pytest.approx(value, rel=1e-7)
    assert len(str(exact(pb.SamplingParams(top_p=value).top_p))) <= len(str(value))


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "INVALID_ARGUMENT"),
        (409, "ALREADY_EXISTS"),
        (412, "FAILED_PRECONDITION"),
        (418, "INVALID_ARGUMENT"),
        (429, "RESOURCE_EXHAUSTED"),
        (500, "INTERNAL"),
        (501, "UNIMPLEMENTED"),
        (502, "INTERNAL"),
        (503, "UNAVAILABLE"),
    ],
)
def test_codes(status: int, code: str) -> None:
    assert code_of(status).name == code
