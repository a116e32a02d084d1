"""Routes over a scripted engine: error envelopes, failing streams, phases of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from sglang_lite.engine.info import LoadSnapshot
from sglang_lite.frontend.request import FinishReason, GenerateRequest, GenerationOutput
from sglang_lite.server.app import make_app
from sglang_lite.server.context import Phase, ServerContext
from sglang_lite.server.heartbeat import watch_heartbeat
from sglang_lite.server.run import drain
from sglang_lite.types import RequestError
from tests.support.fake_engine import FakeEngine, snapshot
from tests.support.server import read_event

Client = TestClient[Any, Any]

BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [1]},
    "/v1/completions": {"prompt": [1]},
    "/v1/chat/completions": {"input_ids": [1]},
}
PATHS = list(BODIES)


@asynccontextmanager
async def serving(engine: FakeEngine, phase: Phase = Phase.READY) -> AsyncIterator[tuple[Client, ServerContext]]:
    context = ServerContext(engine)
    context.phase = phase
    async with TestClient(TestServer(make_app(context))) as client:
        yield client, context


async def events(client: Client, path: str) -> tuple[int, list[Any]]:
    response = await client.post(path, json={**BODIES[path], "stream": True})
    body = await response.read()
    if response.status != 200:
        return response.status, []
    return response.status, [read_event(block) for block in body.split(b"\n\n") if block]


@pytest.mark.parametrize("path", PATHS)
async def test_stream_without_a_tokenizer(path: str) -> None:
    async with serving(FakeEngine()) as (client, _):
        status, found = await events(client, path)
    assert status == 200
    assert found[-1] == "[DONE]"
    if path == "/generate":
        assert "text" not in found[0]
        assert found[-2]["output_ids"] == [ord("h"), ord("i")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 412, 429, 503])
@pytest.mark.parametrize("path", PATHS)
async def test_refusal_before_the_first_chunk_is_a_plain_error(path: str, status: int, stream: bool) -> None:
    engine = FakeEngine(lambda request: [RequestError("no room", status=status, field="text")])
    async with serving(engine) as (client, context):
        response = await client.post(path, json={**BODIES[path], "stream": stream})
        body = await response.json()
        assert response.status == status
        assert context.requests_in_flight == 0
    if path.startswith("/v1/"):
        assert body["object"] == "error"
        assert (body["message"], body["code"]) == ("no room", status)
        assert body["type"] == ("BadRequestError" if status == 400 else str(status))
    else:
        assert body["error"]["message"] == "no room"
        assert body.get("code") == (503 if status == 503 else None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", ["abort", "refusal", "bug"])
async def test_fault_in_a_running_stream_ends_it_without_done(path: str, fault: str) -> None:
    def script(request: GenerateRequest) -> list[GenerationOutput | Exception]:
        ends: dict[str, GenerationOutput | Exception] = {
            "abort": snapshot(request, "h", FinishReason("abort", message="lost", status_code=503)),
            "refusal": RequestError("lost", status=503),
            "bug": KeyError("lost"),
        }
        return [snapshot(request, "h"), ends[fault]]

    async with serving(FakeEngine(script)) as (client, _):
        status, found = await events(client, path)
    assert status == 200
    assert "[DONE]" not in found
    error = found[-1]["error"]
    assert error["code"] == (500 if fault == "bug" else 503)
    assert ("KeyError" if fault == "bug" else "lost") in error["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_bug_is_a_500_and_the_server_goes_on(path: str) -> None:
    engine = FakeEngine(lambda request: [KeyError("secret detail")])
    async with serving(engine) as (client, _):
        response = await client.post(path, json=BODIES[path])
        body = await response.json()
        assert (response.status, body["type"]) == (500, "InternalServerError")
        assert "secret detail" not in body["message"]
        assert (await client.get("/health")).status == 200


@pytest.mark.parametrize("phase", [Phase.WARMING, Phase.DRAINING])
async def test_nothing_is_generated_before_and_after_the_servers_time(phase: Phase) -> None:
    engine = FakeEngine()
    async with serving(engine, phase) as (client, _):
        for path, body in BODIES.items():
            response = await client.post(path, json=body)
            assert response.status == 503
            assert phase.value in await response.text()
        for path in ("/health", "/health_generate", "/ready", "/ping"):
            assert (await client.get(path)).status == 503
        assert (await client.get("/model_info")).status == 200
    assert not engine.started


async def test_dead_engine() -> None:
    engine = FakeEngine()
    engine.is_alive, engine.failure = False, "killed by signal 9"
    async with serving(engine) as (client, _):
        response = await client.post("/generate", json={"input_ids": [1]})
        assert response.status == 503
        assert "killed by signal 9" in await response.text()
        for path in ("/health", "/health_generate", "/ready", "/ping"):
            assert (await client.get(path)).status == 503
        assert (await client.get("/v1/loads")).status == 503


async def test_an_engine_that_stops_answering_is_unhealthy_until_it_answers_again() -> None:
    engine = FakeEngine()
    async with serving(engine) as (client, context):
        watch = asyncio.create_task(watch_heartbeat(context, interval=0))
        for answering in (True, False, True):
            engine.answers = answering
            async with asyncio.timeout(20):
                while context.is_responsive is not answering:
                    await asyncio.sleep(0)
            assert (await client.get("/health")).status == (200 if answering else 503)
        watch.cancel()


async def test_sessions_that_nobody_uses_end_without_a_call() -> None:
    async with serving(FakeEngine()) as (client, context):
        opened = await client.post("/open_session", json={"capacity_of_str_len": 10, "timeout": 0.01})
        assert opened.status == 200
        watch = asyncio.create_task(watch_heartbeat(context, interval=0))
        async with asyncio.timeout(20):
            while len(context.sessions):
                await asyncio.sleep(0)
        watch.cancel()


async def test_metrics_survive_an_engine_that_does_not_answer() -> None:
    engine = FakeEngine(enable_metrics=True)
    async with serving(engine) as (client, _):
        assert "sglang:num_running_reqs" in await (await client.get("/metrics")).text()
        engine.is_alive = False
        text = await (await client.get("/metrics")).text()
        assert "sglang:num_running_reqs" not in text
        assert "sglang_requests_total" in text


async def test_health_probe_needs_a_token() -> None:
    engine = FakeEngine(lambda request: [RequestError("engine stuck", status=500)])
    async with serving(engine) as (client, _):
        assert (await client.get("/health_generate")).status == 503
        engine.load = type(engine.load)(num_running=1)
        assert (await client.get("/health_generate")).status == 200


async def test_health_probe_does_not_ask_a_busy_engine() -> None:
    engine = FakeEngine()
    engine.gate = asyncio.Event()
    async with serving(engine) as (client, _):
        task = asyncio.create_task(client.post("/generate", json={"input_ids": [1]}))
        while not engine.started:
            await asyncio.sleep(0)
        engine.load = LoadSnapshot()
        assert (await client.get("/health_generate")).status == 200
        assert len(engine.started) == 1
        engine.gate.set()
        assert (await task).status == 200
        assert (await client.get("/health_generate")).status == 200
        assert engine.started[1].startswith("HEALTH_CHECK_")


async def test_operator_calls_reach_the_engine() -> None:
    engine = FakeEngine()
    async with serving(engine) as (client, context):
        assert (await (await client.post("/abort_request", json={"rid": "known"})).json())["success"]
        assert not (await (await client.post("/abort_request", json={"rid": "chatcmpl-x"})).json())["success"]
        assert engine.aborted == ["known", "chatcmpl-x", "x"]
        everything = await (await client.post("/abort_request", json={"abort_all": True})).json()
        assert everything == {"success": True, "message": "Aborted 7 requests."}
        assert (await client.post("/pause_generation", json={})).status == 200
        assert context.paused and (await client.get("/ready")).status == 503
        assert (await client.post("/continue_generation")).status == 200
        assert engine.aborted[-2:] == ["pause abort", "resume"] and not context.paused
        assert (await client.post("/flush_cache")).status == 400
        assert (await (await client.get("/flush_cache?timeout=1")).text()).startswith("Cache flushed.")


async def test_requests_that_a_shutdown_ends_get_an_error() -> None:
    engine = FakeEngine(lambda request: [snapshot(request, "h"), snapshot(request, "hi", FinishReason("abort"))])
    engine.gate = asyncio.Event()
    async with serving(engine) as (client, context):
        tasks = [asyncio.create_task(events(client, path)) for path in PATHS]
        unary = asyncio.create_task(client.post("/generate", json={"input_ids": [1]}))
        while len(engine.started) < 4:
            await asyncio.sleep(0)
        await drain(context, asyncio.Event(), 0)
        for task in tasks:
            _, found = await task
            assert "shutting down" in found[-1]["error"]["message"]
        assert (await unary).status == 503


async def test_drain_waits_for_running_requests_then_aborts_them() -> None:
    engine = FakeEngine()
    engine.gate = asyncio.Event()
    async with serving(engine) as (client, context):
        task = asyncio.create_task(client.post("/generate", json={"input_ids": [1]}))
        while not engine.started:
            await asyncio.sleep(0)
        await asyncio.wait_for(drain(context, asyncio.Event(), 0.05), 5)
        assert engine.gate.is_set()  # abort_all was called
        assert (await task).status == 200
        assert context.phase is Phase.DRAINING
        immediate = asyncio.Event()
        immediate.set()
        await asyncio.wait_for(drain(context, immediate, 60), 5)


async def test_drain_is_bounded_when_the_engine_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_lite.server.run._ABORT_SECONDS", 0.05)
    engine = FakeEngine()
    engine.gate = asyncio.Event()
    never = asyncio.Event()
    monkeypatch.setattr(engine, "abort_all", never.wait)
    async with serving(engine) as (client, context):
        task = asyncio.create_task(client.post("/generate", json={"input_ids": [1]}))
        while not engine.started:
            await asyncio.sleep(0)
        await asyncio.wait_for(drain(context, asyncio.Event(), 0), 5)
        engine.gate.set()
        await task


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_text_needs_a_tokenizer(path: str) -> None:
    async with serving(FakeEngine()) as (client, _):
        for fields in ({"prompt": "x", "text": "x", "echo": True}, {"messages": [{"role": "user", "content": "x"}]}):
            target = path if "text" in fields else "/v1/chat/completions"
            response = await client.post(target, json=fields)
            if target != "/generate":
                assert response.status == 400
                assert "skip-tokenizer-init" in await response.text()
        assert (await client.post("/tokenize", json={"prompt": "x"})).status == 400
