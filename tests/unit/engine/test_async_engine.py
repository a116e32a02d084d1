"""AsyncEngine over a real core process: results, refusals, aborts, control calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_lite.engine.async_engine import AsyncEngine
from sglang_lite.types import RequestColumns, RequestError
from tests.unit.engine.conftest import ask, run, run_to_end, start_engine, until, until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDLESS = 1000


async def test_a_stream_yields_growing_snapshots(engine: AsyncEngine) -> None:
    texts = [output.text for output in await run(engine, ask("grow", stream=True))]
    assert texts[-1] == "BCDABCDABC"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert len(texts) > 3


async def test_a_unary_request_yields_once(engine: AsyncEngine) -> None:
    outputs = await run(engine, ask("once", "0", None))
    assert [output.text for output in outputs] == ["123456789"]
    assert outputs[0].finish_reason is not None
    assert outputs[0].finish_reason.to_json() == {"type": "stop", "matched": 258}
    assert (outputs[0].prompt_tokens, outputs[0].completion_tokens) == (1, 10)


async def test_token_ids_instead_of_text(engine: AsyncEngine) -> None:
    output = await run_to_end(engine, ask("ids", None, 3, input_ids=[65]))
    assert output.output_ids == [66, 67, 68]


async def test_a_stop_string_ends_the_request_in_the_core(engine: AsyncEngine) -> None:
    output = await run_to_end(engine, ask("stop", "A", ENDLESS, sampling={"stop": ("CD",)}))
    assert output.text == "B"
    assert output.completion_tokens == 3
    await until_idle(engine)


async def test_unlimited_output_ends_at_the_context(engine: AsyncEngine) -> None:
    output = await run_to_end(engine, ask("all", "A", None))
    assert output.completion_tokens == engine.info.context_length - 1


async def test_a_long_prompt_is_tokenized_in_a_thread(engine: AsyncEngine) -> None:
    outputs = await asyncio.gather(*(run_to_end(engine, ask(f"long{i}", "A" * (600 + i), 4)) for i in range(8)))
    assert [output.prompt_tokens for output in outputs] == [600 + i for i in range(8)]
    assert {output.text for output in outputs} == {"BCDA"}


@pytest.mark.parametrize("bad", [{"priority": 2**70}, {"namespace": "\ud800"}, {"top_logprobs_num": 2**40}])
async def test_a_value_that_no_frame_can_hold_refuses_its_request_alone(
    engine: AsyncEngine, bad: dict[str, Any]
) -> None:
    """Requests of one turn of the event loop share a frame: the others must not wait for ever."""
    async with asyncio.timeout(10):
        first, refused, last = await asyncio.gather(
            run_to_end(engine, ask("before", "A", 3)),
            run_to_end(engine, ask("refused", "A", 3, **bad)),
            run_to_end(engine, ask("behind", "0", 3)),
            return_exceptions=True,
        )
    assert isinstance(refused, RequestError) and refused.status == 400
    assert not isinstance(first, BaseException) and not isinstance(last, BaseException)
    assert (first.text, last.text) == ("BCD", "123")
    assert engine.num_live == 0


@pytest.mark.parametrize(
    ("text", "max_new_tokens", "numbers"),
    [("A" * 1024, 1, ("1024 tokens", "longer than")), ("A" * 10, 1020, ("1024", "1030", "10 tokens", "1020 tokens"))],
)
async def test_what_exceeds_the_context_is_refused_with_the_numbers(
    engine: AsyncEngine, text: str, max_new_tokens: int, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(RequestError) as refused:
        await run(engine, ask("over", text, max_new_tokens))
    assert refused.value.status == 400
    assert all(number in refused.value.message for number in numbers)
    assert (await run_to_end(engine, ask("over", "A", 1))).text == "B"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"input_ids": [65, 260]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [2**31]}, "input_ids"),
        ({"input_ids": [2**70]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"sampling": {"logit_bias": {260: 1.0}}, "input_ids": [65]}, "logit_bias"),
        ({"sampling": {"stop_token_ids": (10**9,)}, "input_ids": [65]}, "stop_token_ids"),
        ({"token_ids_logprob": (-3,), "input_ids": [65]}, "token_ids_logprob"),
        ({"logprob_start_len": 2, "input_ids": [65], "return_logprob": True}, "logprob_start_len"),
    ],
)
async def test_ids_outside_the_vocabulary_are_refused(engine: AsyncEngine, more: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        await run(engine, ask("outside", None, **more))
    assert (refused.value.status, refused.value.field) == (400, field)
    assert engine.num_live == 0


async def test_an_id_names_one_live_request(engine: AsyncEngine) -> None:
    first = engine.generate(ask("same", "A", ENDLESS, stream=True))
    await anext(first)
    with pytest.raises(RequestError, match="Duplicate request ID detected: same") as refused:
        await run(engine, ask("same"))
    assert refused.value.status == 400
    assert (await anext(first)).finish_reason is None, "the first one goes on"
    await first.aclose()
    assert (await run_to_end(engine, ask("same", "A", 2))).text == "BC"


async def test_leaving_the_iterator_aborts_in_the_core(engine: AsyncEngine) -> None:
    stream = engine.generate(ask("left", "A", ENDLESS, stream=True))
    await anext(stream)
    await stream.aclose()
    await until_idle(engine)
    assert engine.num_live == 0


async def test_cancelling_the_reader_aborts_in_the_core(engine: AsyncEngine) -> None:
    task = asyncio.create_task(run(engine, ask("cancelled", "A", ENDLESS)))
    await until(lambda: engine.num_live == 1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await until_idle(engine)


async def test_abort_matches_a_prefix_and_ends_the_stream(engine: AsyncEngine) -> None:
    tasks = [asyncio.create_task(run(engine, ask(f"batch_{i}", "A", ENDLESS, stream=True))) for i in range(3)]
    await until(lambda: engine.num_live == 3)
    assert engine.abort("batch_1")
    reason = (await tasks[1])[-1].finish_reason
    assert reason is not None
    assert (reason.type, reason.status_code) == ("abort", None)
    assert engine.abort("batch")
    await asyncio.gather(*tasks)
    assert not engine.abort("batch"), "an id that is gone is answered truthfully"
    assert not engine.abort("")
    await until_idle(engine)


async def test_abort_before_the_request_has_left(engine: AsyncEngine) -> None:
    task = asyncio.create_task(run(engine, ask("early", "A" * 900, 100)))
    await asyncio.sleep(0)
    assert engine.abort("early")
    reason = (await task)[-1].finish_reason
    assert reason is not None
    assert reason.type == "abort"


async def test_abort_all_counts(engine: AsyncEngine) -> None:
    tasks = [asyncio.create_task(run_to_end(engine, ask(f"all_{i}", "A", ENDLESS))) for i in range(5)]
    await until(lambda: engine.num_live == 5)
    await asyncio.sleep(0)
    assert await engine.abort_all() == 5
    assert {output.finish_reason.type for output in await asyncio.gather(*tasks) if output.finish_reason} == {"abort"}
    await until_idle(engine)


async def test_flush_is_refused_while_a_stream_runs(engine: AsyncEngine) -> None:
    prompt = "ABCD" * 16
    await run(engine, ask("warm", prompt, 4))
    assert (await run_to_end(engine, ask("hit", prompt, 4))).cached_tokens > 0
    stream = engine.generate(ask("busy", "A", ENDLESS, stream=True))
    await anext(stream)
    assert not await engine.flush_cache()
    assert (await anext(stream)).finish_reason is None
    await stream.aclose()
    assert await engine.flush_cache(timeout=2.0)
    assert (await run_to_end(engine, ask("cold", prompt, 4))).cached_tokens == 0


async def test_flush_right_after_the_last_stream_succeeds(engine: AsyncEngine) -> None:
    for turn in range(10):
        await run(engine, ask(f"last_{turn}", "A", 5, stream=True))
        assert await engine.flush_cache()


async def test_pause_in_place_holds_and_refuses(engine: AsyncEngine) -> None:
    stream = engine.generate(ask("held", "A", 300, stream=True))
    await anext(stream)
    await engine.pause("in_place")
    with pytest.raises(RequestError) as refused:
        await run(engine, ask("late"))
    assert refused.value.status == 412
    held = await engine.loads()
    assert held.paused
    assert held.num_running == 1
    again = await engine.loads()
    assert again.generated_tokens == held.generated_tokens, "nothing is generated during the pause"
    await engine.resume()
    outputs = [output async for output in stream]
    assert outputs[-1].completion_tokens == 300
    assert (await run_to_end(engine, ask("late", "A", 1))).text == "B"


async def test_pause_with_abort_ends_what_runs(engine: AsyncEngine) -> None:
    task = asyncio.create_task(run_to_end(engine, ask("ended", "A", ENDLESS)))
    await until(lambda: engine.num_live == 1)
    await engine.pause("abort")
    reason = (await task).finish_reason
    assert reason is not None
    assert reason.type == "abort"
    await engine.resume()
    with pytest.raises(RequestError, match="mode"):
        await engine.pause("sideways")


async def test_a_slow_reader_gets_fewer_steps_and_the_whole_text(engine: AsyncEngine) -> None:
    texts = []
    async for output in engine.generate(ask("slow", "A", 400, stream=True)):
        texts.append(output.text)
        await asyncio.sleep(0.1)
    assert len(texts) < 100
    assert texts[-1] == ("BCDA" * 100)


async def test_requests_of_one_turn_share_a_frame(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[RequestColumns] = []
    client: Any = engine._client
    submit = client.submit

    def recorded(columns: RequestColumns, wanted: Sequence[int | None] = ()) -> None:
        frames.append(columns)
        submit(columns, wanted)

    monkeypatch.setattr(client, "submit", recorded)
    await asyncio.gather(*(run(engine, ask(f"turn_{i}", "A", 2)) for i in range(32)))
    assert [len(frame) for frame in frames] == [32]


async def test_control_calls_are_quick_while_saturated(engine: AsyncEngine) -> None:
    tasks = [asyncio.create_task(run(engine, ask(f"load_{i}", "A", ENDLESS, stream=True))) for i in range(64)]
    await until(lambda: engine.num_live == 64)
    slowest = 0.0
    for _ in range(10):
        started = time.perf_counter()
        load = await engine.loads()
        assert not await engine.flush_cache()
        slowest = max(slowest, time.perf_counter() - started)
    assert slowest < 1.0
    assert load.num_running + load.num_waiting == 64
    await engine.abort_all()
    await asyncio.gather(*tasks)
    await until_idle(engine)


async def test_sockets_live_in_a_private_directory_that_is_removed(chain_model: Path) -> None:
    engine = await start_engine(chain_model)
    client: Any = engine._client
    directory = Path(client._process.directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    pending = asyncio.create_task(run_to_end(engine, ask("pending", "A", None)))
    await until(lambda: engine.num_live == 1)
    await engine.close()
    assert not directory.exists()
    assert (await pending).finish_reason is not None
    with pytest.raises(RequestError) as refused:
        await run(engine, ask("after"))
    assert refused.value.status == 503


async def test_full_queue_and_long_prompts_depend_on_the_options(chain_model: Path) -> None:
    options: dict[str, Any] = {"max_running_requests": 1, "max_queued_requests": 1, "max_total_tokens": 256}
    async with await start_engine(chain_model, "5", allow_auto_truncate=True, **options) as engine:
        assert (await run_to_end(engine, ask("cut", "A" * 300, 4))).prompt_tokens < 256
        tasks = [asyncio.create_task(run_to_end(engine, ask(f"q{i}", "A", 40))) for i in range(6)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [result for result in results if isinstance(result, RequestError)]
        assert refused
        assert {error.status for error in refused} == {429}
        assert len(refused) < 6


async def test_a_prompt_beyond_the_pool_is_refused(chain_model: Path) -> None:
    async with await start_engine(chain_model, max_total_tokens=256) as engine:
        with pytest.raises(RequestError, match=r"300 tokens.*256 tokens") as refused:
            await run(engine, ask("pool", "A" * 300, 4))
        assert refused.value.status == 400
        output = await run_to_end(engine, ask("capped", "A" * 200, 400))
        assert output.completion_tokens == 56
