"""``--disaggregation-fallback local``: a decode server whose prefill servers are gone computes prompts itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.disaggregated_pair import DECODE, PREFILL, SHORT_WAITS, Oracle, Pair, prompt_of


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    fallback = ("--disaggregation-fallback", "local", "--chunked-prefill-size", "64")
    pair = Pair("tcp", model, tmp_path_factory.mktemp("pair"), environment=SHORT_WAITS, decode_options=fallback)
    try:
        pair.start()
        yield pair
    finally:
        pair.close()


async def test_the_other_side_computes_while_it_lives(pair: Pair, oracle: Oracle) -> None:
    call = pair.both(pair.body(prompt_of(1, 70)))
    assert (await call[DECODE]).tokens == oracle.tokens(prompt_of(1, 70))
    assert (await pair.loads(DECODE))["total_prefill_uncached_tokens"] == 0
    await pair.settled()


@pytest.mark.parametrize("stage", ["half", "done"])
async def test_a_prefill_server_that_dies_under_way(pair: Pair, oracle: Oracle, stage: str) -> None:
    """The prompt is computed here; no client sees that anything happened, streams included."""
    await pair.revive()
    pair.hold(stage)
    prompt = prompt_of(2, 150)
    prefilled = asyncio.create_task(pair.send(PREFILL, body := pair.body(prompt, stream=True)))
    decoded = asyncio.create_task(pair.send(DECODE, body))
    await pair.until(PREFILL, lambda load: load["disaggregation"]["prefill_inflight_queue_reqs"] == 1)
    pair.sides[PREFILL].kill()
    answer = await asyncio.wait_for(decoded, 12.0)
    events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith("data: {")]
    assert events[-1]["output_ids"] == oracle.tokens(prompt)
    assert (await prefilled).is_failure
    await pair.until(DECODE, lambda load: load["num_reqs"] == 0 and load["num_used_tokens"] == 0)


async def test_a_pool_that_is_gone(pair: Pair, oracle: Oracle) -> None:
    """Many at once while others decode; requests without a pair are served as well."""
    pair.open()
    pair.sides[PREFILL].kill()
    prompts = [prompt_of(seed, 100) for seed in range(3, 11)]
    answers = await asyncio.gather(*(pair.send(DECODE, pair.body(prompt)) for prompt in prompts))
    assert [answer.tokens for answer in answers] == [oracle.tokens(prompt) for prompt in prompts]
    body = pair.body(prompts[0])
    for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
        del body[name]
    assert (await pair.send(DECODE, body)).tokens == oracle.tokens(prompts[0])
    await pair.until(DECODE, lambda load: load["num_reqs"] == 0 and load["num_used_tokens"] == 0)


async def test_the_pool_comes_back(pair: Pair, oracle: Oracle) -> None:
    await pair.revive()
    before = (await pair.loads(DECODE))["disaggregation"]["transfers"]
    call = pair.both(pair.body(prompt_of(12, 70)))
    assert (await call[DECODE]).tokens == oracle.tokens(prompt_of(12, 70))
    assert (await pair.loads(DECODE))["disaggregation"]["transfers"] == before + 1
