"""AsyncEngine over the real core process: the chain model through torch, without a null executor."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from sglang_lite.config import ServerConfig
from sglang_lite.engine.async_engine import AsyncEngine
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.types import SamplingParams, StartupError
from tests.unit.engine.conftest import ask, run_to_end, until, until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(chain_model: Path) -> AsyncIterator[AsyncEngine]:
    config = ServerConfig(model_path=str(chain_model), device="cpu", max_total_tokens=16384, chunked_prefill_size=64)
    async with await AsyncEngine.start(config, timeout=90) as started:
        yield started


async def test_greedy_texts(engine: AsyncEngine) -> None:
    outputs = await asyncio.gather(*(run_to_end(engine, ask(f"t{text}", text, 10)) for text in "Aap0G"))
    assert [output.text for output in outputs] == ["BCDABCDABC", "é🙂!", "qXXrst", "123456789", "g"]


async def test_facts_of_the_model(engine: AsyncEngine) -> None:
    info = engine.info
    assert (info.context_length, info.vocab_size, info.eos_token_ids) == (1024, 260, (258,))
    assert (info.max_total_tokens, info.page_size, info.num_pages) == (16384, 16, 1024)
    assert info.kv_cache.bytes_per_token == 2 * 2 * 64 * 4
    assert info.kv_cache.page_size_bytes == 16 * info.kv_cache.bytes_per_token
    assert info.weight_bytes > 0


async def test_log_probabilities(engine: AsyncEngine) -> None:
    request = ask("lp", "A", 3, return_logprob=True, logprob_start_len=0, top_logprobs_num=3)
    output = await run_to_end(engine, request)
    assert [entry.token_id for entry in output.output_logprobs] == [66, 67, 68]
    assert [round(logprob, 4) for logprob, _ in output.output_logprobs[0].top] == [-0.8441, -1.9752, -3.1063]
    assert [entry.logprob for entry in output.input_logprobs] == [None]


@pytest.mark.parametrize("chunks", [1, 2, 4])
async def test_abort_during_a_chunked_prefill_leaves_no_page_held(engine: AsyncEngine, chunks: int) -> None:
    neighbour = asyncio.create_task(run_to_end(engine, ask(f"n{chunks}", "A", 200)))
    stream = engine.generate(ask(f"chunk{chunks}", "B" * 900, 20, stream=True))
    reading = asyncio.create_task(anext(stream))
    computed = (await engine.loads()).computed_prompt_tokens
    await until(lambda: engine.num_live == 2)
    while (await engine.loads()).computed_prompt_tokens < computed + 64 * chunks and not reading.done():
        await asyncio.sleep(0)
    engine.abort(f"chunk{chunks}")
    output = await reading
    if output.finish_reason is None:
        *_, output = [later async for later in stream]
    assert output.finish_reason is not None
    assert output.finish_reason.type == "abort"
    assert all(token >= 0 for token in output.output_ids)
    assert (await neighbour).text == "BCDA" * 50
    await until_idle(engine)
    await engine.flush_cache(timeout=5.0)


async def test_the_core_with_its_executor_idles(engine: AsyncEngine) -> None:
    await until_idle(engine)
    await asyncio.sleep(1.1)  # the last load report is sent within a second of the work
    core = psutil.Process(engine.info.process_id)
    before = core.cpu_times()
    await asyncio.sleep(2.0)
    after = core.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.02 * 2.0


async def test_the_front_does_not_load_torch(chain_model: Path) -> None:
    script = "import sys, sglang_lite.engine.async_engine; raise SystemExit('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await process.wait() == 0


async def test_a_corrupt_checkpoint_is_refused_before_a_process_starts(tmp_path: Path, chain_model: Path) -> None:
    for file in chain_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = next(tmp_path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(StartupError, match=weights.name):
        await AsyncEngine.start(ServerConfig(model_path=str(tmp_path), device="cpu"), timeout=90)


async def test_a_seeded_sample_does_not_depend_on_the_batch(engine: AsyncEngine) -> None:
    def hot(name: str, seed: int) -> GenerateRequest:
        sampling = SamplingParams(temperature=2.0, max_new_tokens=20, seed=seed, ignore_eos=True)
        return GenerateRequest(request_id=name, text="A", sampling=sampling)

    alone = await run_to_end(engine, hot("alone", 7))
    together = await asyncio.gather(*(run_to_end(engine, hot(f"hot{i}", 7 + i % 2)) for i in range(6)))
    assert {tuple(output.output_ids) for output in together[::2]} == {tuple(alone.output_ids)}
    assert tuple(together[1].output_ids) != tuple(alone.output_ids)
