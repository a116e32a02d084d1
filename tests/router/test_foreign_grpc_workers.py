"""gRPC workers that know the published RPCs alone: native bodies travel as messages, and streams that break say so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from sglang_lite.router.options import parse_options
from sglang_lite.router.registration import NotReadyError, register
from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2 as pb
from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2_grpc
from sglang_lite.types import StartupError
from tests.support.null_workers import RouterUnderTest, router_over
from tests.unit.server.test_security import make_certificate

Script = Callable[[Any, Any], Any]


class ScriptedService(sglang_pb2_grpc.SglangServiceServicer):
    """Answers what its scripts say, and records requests."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.generate: Script | None = None
        self.chat: Script | None = None

    async def HealthCheck(self, request: Any, call: Any) -> Any:
        return pb.HealthCheckResponse(healthy=True)

    async def GetServerInfo(self, request: Any, call: Any) -> Any:
        return pb.ServerInfoResponse(version="1", runtime="other", attributes={"disaggregation_mode": "null"})

    async def GetModelInfo(self, request: Any, call: Any) -> Any:
        return pb.ModelInfoResponse(served_model_name="m", model_path="/m")

    async def Abort(self, request: Any, call: Any) -> Any:
        self.seen.append(request)
        return pb.ControlResponse(success=True, message="aborted")

    async def FlushCache(self, request: Any, call: Any) -> Any:
        return pb.ControlResponse(success=False, message="requests run")

    async def TextGenerate(self, request: Any, call: Any) -> Any:
        self.seen.append(request)
        assert self.generate is not None
        async for message in self.generate(request, call):
            yield message

    async def Generate(self, request: Any, call: Any) -> Any:
        async for message in self.TextGenerate(request, call):
            yield message

    async def ChatComplete(self, request: Any, call: Any) -> Any:
        self.seen.append(request)
        assert self.chat is not None
        async for message in self.chat(request, call):
            yield message


@asynccontextmanager
async def scripted(**options: Any) -> AsyncIterator[tuple[ScriptedService, RouterUnderTest]]:
    service, server = ScriptedService(), grpc.aio.server()
    sglang_pb2_grpc.add_SglangServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with router_over(urls=(f"grpc://127.0.0.1:{port}",), **options) as router:
            yield service, router
    finally:
        await server.stop(None)


def chunk(text: str, ids: list[int], done: int) -> Any:
    part = {"text": text, "token_ids": ids, "prompt_tokens": 1, "completion_tokens": done}
    return pb.GenerateResponse(request_id="r", chunk=part)


def complete(text: str, ids: list[int], index: int = 0) -> Any:
    part = {"text": text, "output_ids": ids, "finish_reason": "length", "prompt_tokens": 1, "index": index}
    return pb.GenerateResponse(request_id="r", complete={**part, "completion_tokens": len(ids)})


async def two_tokens(request: Any, call: Any) -> AsyncIterator[Any]:
    if request.options.stream:
        yield chunk("B", [66], 1)
        yield chunk("C", [67], 2)
    for index in range(max(1, request.sampling_params.n)):
        yield complete("BC", [66, 67], index)


async def test_native_bodies_travel_as_messages() -> None:
    async with scripted() as (service, router):
        service.generate = two_tokens
        sampling = {"max_new_tokens": 2, "temperature": 0, "stop": "X", "seed": 3}
        body = {"text": "A", "rid": "r", "sampling_params": sampling, "return_logprob": False, "model": None}
        status, _, got = await router.post("/generate", body)
        result = msgspec.json.decode(got)
        assert status == 200
        assert (result["text"], result["output_ids"]) == ("BC", [66, 67])
        assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
        request = service.seen[-1]
        assert (request.text, request.options.request_id, list(request.sampling_params.stop)) == ("A", "r", ["X"])
        assert request.sampling_params.HasField("temperature") and request.sampling_params.seed == 3
        _, _, got = await router.post("/generate", {"input_ids": [65], "stream": True, "sampling_params": sampling})
        events = [msgspec.json.decode(block[6:]) for block in got.split(b"\n\n")[:-2]]
        assert [event["text"] for event in events] == ["B", "BC", "BC"]
        assert [event["output_ids"] for event in events] == [[66], [66, 67], [66, 67]]
        assert events[-1]["meta_info"]["finish_reason"]["type"] == "length" and got.endswith(b"data: [DONE]\n\n")
        assert list(service.seen[-1].input_ids) == [65]
        _, _, got = await router.post("/generate", {**body, "sampling_params": {**sampling, "n": 2}})
        assert [result["index"] for result in msgspec.json.decode(got)] == [0, 1]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"text": "A", "return_logprob": True}, "return_logprob"),
        ({"text": "A", "sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
        ({"text": ["A", "B"]}, "text"),
        ({"text": "A", "sampling_params": {"seed": "x"}}, "seed"),
        ({"text": "A", "sampling_params": [1]}, "sampling_params"),
    ],
)
async def test_what_messages_cannot_carry_is_refused(body: Any, named: str) -> None:
    async with scripted() as (service, router):
        status, _, got = await router.post("/generate", body)
        assert status == 400 and (named.encode() in got or b"str" in got), got
        assert service.seen == []


async def test_control_calls_take_their_own_rpcs() -> None:
    async with scripted() as (service, router):
        status, _, got = await router.post("/abort_request", {"rid": "r1"})
        assert (status, service.seen[-1].request_id) == (200, "r1")
        assert msgspec.json.decode(got)["aborted_workers"] == 1
        assert (await router.post("/flush_cache", {}))[0] == 400
        status, _, got = await router.post("/abort_request", {"rid": "r1", "force": True})
        assert status == 400 and b"force" in got
        assert (await router.post("/v1/messages", {"model": "m"}))[0] == 501
        loads = msgspec.json.decode((await router.get("/v1/loads"))[2])
        assert loads["failed"] == 1
        assert router.context.registry.registered()[0].models == ("m", "/m")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.UNAUTHENTICATED, 401),
        (grpc.StatusCode.NOT_FOUND, 404),
        (grpc.StatusCode.FAILED_PRECONDITION, 412),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (grpc.StatusCode.UNIMPLEMENTED, 501),
        (grpc.StatusCode.INTERNAL, 500),
        (grpc.StatusCode.UNAVAILABLE, 502),
    ],
)
async def test_codes_become_statuses(code: grpc.StatusCode, status: int) -> None:
    async def refuse(request: Any, call: Any) -> AsyncIterator[Any]:
        await call.abort(code, "say so")
        yield

    async with scripted(disable_retries=True) as (service, router):
        service.chat = refuse
        got, _, body = await router.post("/v1/chat/completions", {"model": "m"})
        assert got == status
        assert (b"say so" in body) == (status != 502)


async def test_workers_with_certificates(tmp_path: Path) -> None:
    """``grpcs``: the worker is checked, and asks for the router's own certificate."""
    (worker_chain, worker_key), (router_chain, router_key) = (
        make_certificate(tmp_path, name) for name in ("worker", "router")
    )
    service, server = ScriptedService(), grpc.aio.server()
    sglang_pb2_grpc.add_SglangServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    pair = (worker_key.read_bytes(), worker_chain.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], router_chain.read_bytes(), require_client_auth=True)
    port = server.add_secure_port("localhost:0", credentials)
    await server.start()
    known = {"client_cert_path": str(router_chain), "client_key_path": str(router_key)}
    url = f"grpcs://localhost:{port}"
    try:
        async with router_over(urls=(url,), ca_cert_paths=(str(worker_chain),), **known) as router:
            assert (await router.post("/abort_request", {"rid": "r"}))[0] == 200
        async with router_over() as strange:  # trusts nobody of this kind
            assert (await strange.post("/workers", {"url": url}))[0] == 202
            with pytest.raises(NotReadyError):
                await register(strange.context, strange.context.registry.workers[url])
    finally:
        await server.stop(None)


async def test_a_stream_that_breaks_ends_with_an_error() -> None:
    async def breaks(request: Any, call: Any) -> AsyncIterator[Any]:
        yield pb.OpenAIJsonResponse(json=b'{"a":1}')
        await call.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async with scripted(cb_failure_threshold=1) as (service, router):
        service.chat = breaks
        status, _, body = await router.post("/v1/chat/completions", {"model": "m", "stream": True})
        assert status == 200 and body.startswith(b'data: {"a":1}\n\n') and b"[DONE]" not in body
        assert b'"code":"upstream_unreachable"' in body
        assert len(service.seen) == 1
        assert (await router.post("/v1/chat/completions", {}))[1]["x-router-error-code"] == "breaker_open"


async def test_errors_of_a_stream_are_told_once() -> None:
    async def fails(request: Any, call: Any) -> AsyncIterator[Any]:
        yield pb.OpenAIJsonResponse(json=b'{"a":1}')
        yield pb.OpenAIJsonResponse(json=b'{"error":{"message":"no","code":500}}')
        await call.abort(grpc.StatusCode.INTERNAL, "no")

    async with scripted() as (service, router):
        service.chat = fails
        _, _, body = await router.post("/v1/chat/completions", {"model": "m", "stream": True})
        assert body == b'data: {"a":1}\n\ndata: {"error":{"message":"no","code":500}}\n\n'


async def test_a_slow_reader_slows_the_worker_and_leaving_cancels_it() -> None:
    cancelled, sent = asyncio.Event(), 0

    async def flood(request: Any, call: Any) -> AsyncIterator[Any]:
        nonlocal sent
        try:
            while True:
                yield pb.OpenAIJsonResponse(json=b'{"a":"%s"}' % (b"x" * 65536))
                sent += 1
        finally:
            cancelled.set()

    async with scripted() as (service, router):
        service.chat = flood
        async with router.session.post(
            router.url + "/v1/chat/completions", json={"model": "m", "stream": True}
        ) as response:
            await response.content.readuntil(b"\n\n")
            before = -1
            async with asyncio.timeout(20):
                while before != sent:  # until nothing moves any more
                    before = sent
                    await asyncio.sleep(0.3)
            assert sent < 1024
            response.close()
        await asyncio.wait_for(cancelled.wait(), 5)
        assert router.context.leases.total == 0


def test_addresses_of_grpc_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_options(["--worker-urls", "grpc://a:1", "grpcs://b:2/"]).worker_urls == ("grpc://a:1", "grpcs://b:2")
    for wrong in ("grpc://a", "grpc://a:1/x"):
        with pytest.raises(StartupError, match="HOST:PORT"):
            parse_options(["--worker-urls", wrong])
    monkeypatch.setattr("sglang_lite.router.workers.find_spec", lambda name: None)
    with pytest.raises(StartupError, match="grpc"):
        parse_options(["--worker-urls", "grpc://a:1"])
