"""Sequences of one request: collected, merged, cancelled."""

from __future__ import annotations

import asyncio

import pytest

from sglang_lite.frontend.request import FinishReason, GenerateRequest, GenerationOutput
from sglang_lite.server.context import ServerContext
from sglang_lite.server.generation import MergedStream, collect
from sglang_lite.types import RequestError, SamplingParams
from tests.support.fake_engine import FakeEngine, hello, snapshot


def requests(count: int, *, stream: bool = True) -> list[GenerateRequest]:
    return [
        GenerateRequest(request_id=f"r{index}", input_ids=[1], stream=stream, sampling=SamplingParams())
        for index in range(count)
    ]


async def test_outputs_come_in_the_order_of_the_requests() -> None:
    engine = FakeEngine()
    outputs = await collect(ServerContext(engine), requests(3, stream=False))
    assert [output.request_id for output in outputs] == ["r0", "r1", "r2"]
    assert not engine.closed


async def test_one_failure_aborts_the_others() -> None:
    def script(request: GenerateRequest) -> list[GenerationOutput | Exception]:
        return [RequestError("too long")] if request.request_id == "r1" else hello(request)

    engine = FakeEngine(script)
    with pytest.raises(RequestError, match="too long"):
        await collect(ServerContext(engine), requests(3, stream=False))
    assert "r1" in engine.closed


async def test_server_side_aborts_are_errors_and_client_side_ones_results() -> None:
    def ended(status: int | None) -> FakeEngine:
        reason = FinishReason("abort", message="because", status_code=status)
        return FakeEngine(lambda request: [snapshot(request, "x", reason)])

    [output] = await collect(ServerContext(ended(None)), requests(1))
    assert output.finish_reason is not None and output.finish_reason.type == "abort"
    with pytest.raises(RequestError, match="because") as caught:
        await collect(ServerContext(ended(503)), requests(1))
    assert caught.value.status == 503


async def test_an_engine_that_says_nothing_is_an_error() -> None:
    with pytest.raises(RequestError, match="without a result") as caught:
        await collect(ServerContext(FakeEngine(lambda request: [])), requests(1))
    assert caught.value.status == 500


async def test_cancelling_leaves_every_sequence() -> None:
    engine = FakeEngine()
    engine.gate = asyncio.Event()
    task = asyncio.create_task(collect(ServerContext(engine), requests(3)))
    while len(engine.started) < 3:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(engine.closed) == ["r0", "r1", "r2"]


@pytest.mark.parametrize("count", [1, 3])
async def test_merged_stream_delivers_every_end(count: int) -> None:
    engine = FakeEngine()
    async with MergedStream(ServerContext(engine), requests(count)) as merged:
        events = [(index, output.text, output.finish_reason is not None) async for index, output in merged]
    assert {index for index, text, ended in events if ended and text == "hi"} == set(range(count))
    assert not engine.closed


async def test_unread_snapshots_are_replaced() -> None:
    def script(request: GenerateRequest) -> list[GenerationOutput | Exception]:
        end = snapshot(request, "x" * 50, FinishReason("length", length=50))
        return [*(snapshot(request, "x" * length) for length in range(1, 50)), end]

    seen: list[tuple[int, int]] = []
    async with MergedStream(ServerContext(FakeEngine(script)), requests(2)) as merged:
        async for index, output in merged:
            seen.append((index, output.completion_tokens))
            await asyncio.sleep(0.01)
    assert len(seen) < 10
    assert {(0, 50), (1, 50)} <= set(seen)


@pytest.mark.parametrize("count", [1, 3])
async def test_leaving_a_merged_stream_leaves_every_sequence(count: int) -> None:
    engine = FakeEngine(lambda request: [snapshot(request, "x"), snapshot(request, "xy")])
    async with MergedStream(ServerContext(engine), requests(count)) as merged:
        await anext(merged)
        engine.gate = asyncio.Event()
    assert sorted(engine.closed) == [f"r{index}" for index in range(count)]


async def test_failure_in_a_merged_stream_reaches_the_reader() -> None:
    def script(request: GenerateRequest) -> list[GenerationOutput | Exception]:
        return [snapshot(request, "x"), RuntimeError("broken")] if request.request_id == "r1" else hello(request)

    with pytest.raises(RuntimeError, match="broken"):
        async with MergedStream(ServerContext(FakeEngine(script)), requests(2)) as merged:
            async for _ in merged:
                pass


def choices_of(count: int) -> list[GenerateRequest]:
    sampling = SamplingParams(n=count)
    return [GenerateRequest(request_id=f"r_{index}", input_ids=[1], sampling=sampling) for index in range(count)]


async def test_a_prompt_with_several_choices_is_computed_once_first() -> None:
    engine = FakeEngine()
    outputs = await collect(ServerContext(engine), choices_of(3), 3)
    assert engine.started[0] == "r_0_prompt"
    assert len(engine.started) == 4 and len(outputs) == 3
    without = FakeEngine(disable_radix_cache=True)
    await collect(ServerContext(without), choices_of(3), 3)
    assert len(without.started) == 3


async def test_abort_while_the_shared_prompt_is_computed_ends_all_choices() -> None:
    engine = FakeEngine(lambda request: [snapshot(request, "", FinishReason("abort", message="by the client"))])
    outputs = await collect(ServerContext(engine), choices_of(2), 2)
    async with MergedStream(ServerContext(engine), choices_of(2), 2) as merged:
        streamed = [output async for _, output in merged]
    assert [output.finish_reason.type for output in [*outputs, *streamed] if output.finish_reason] == ["abort"] * 4
    assert [output.request_id for output in [*outputs, *streamed]] == ["r_0", "r_1"] * 2
    assert set(engine.started) == {"r_0_prompt"}
