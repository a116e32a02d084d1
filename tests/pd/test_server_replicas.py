"""Data-parallel replicas on both sides of a pair: rooms find the replica that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.disaggregated_pair import DECODE, PATIENT, PREFILL, Oracle, Pair, prompt_of


@pytest.mark.parametrize("method", ["follow_bootstrap_room", "round_robin"])
async def test_rooms_find_their_replica(model: Path, oracle: Oracle, tmp_path: Path, method: str) -> None:
    options = ["--dp-size", "2", "--load-balance-method", method]
    pair = Pair("tcp", model, tmp_path, environment=PATIENT, gated=False, options=options)
    try:
        for side in pair.sides.values():
            side.start()
        await pair.wait_ready()
        prompts = [prompt_of(seed, 40) for seed in range(8)]
        calls = [pair.both(pair.body(prompt, room)) for room, prompt in enumerate(prompts)]
        for prompt, call in zip(prompts, calls, strict=True):
            answer = await call[DECODE]
            assert answer.status == 200, answer
            assert answer.tokens == oracle.tokens(prompt)
            assert (await call[PREFILL]).status == 200
        for role in (PREFILL, DECODE):
            moved = [load["disaggregation"]["transfers"] for load in await pair.all_loads(role)]
            assert moved == [4, 4]
        await pair.settled()
    finally:
        pair.close()
