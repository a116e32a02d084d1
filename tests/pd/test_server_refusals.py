"""One server refuses its half of a pair: the other half, which waits for it, hears of that at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.disaggregated_pair import DECODE, PREFILL, Oracle, Pair, prompt_of

LIMIT = 1.0
"""Seconds within which the other side must have heard. The servers themselves would wait for minutes."""


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair("tcp", model, tmp_path_factory.mktemp("pair"))
    try:
        pair.start()
        yield pair
    finally:
        pair.close()


@pytest.mark.parametrize("waiting", [DECODE, PREFILL])
@pytest.mark.parametrize("is_first", [True, False], ids=["refused first", "refused while the other waits"])
@pytest.mark.parametrize("why", ["paused", "too long"])
async def test_the_half_that_waits(pair: Pair, oracle: Oracle, waiting: str, why: str, is_first: bool) -> None:
    """Prefill answers an error while decode waits, or decode refuses while prefill queues."""
    refusing = PREFILL if waiting == DECODE else DECODE
    name = "decode_transfer_queue_reqs" if waiting == DECODE else "prefill_bootstrap_queue_reqs"
    body = pair.body(prompt_of(1, 40))
    refused = {**body, "input_ids": prompt_of(1, 1100)} if why == "too long" else body
    if why == "paused":
        await pair.send(refusing, {"mode": "in_place"}, "/pause_generation")
    try:
        if is_first:
            answer = await pair.send(refusing, refused)
            other = asyncio.create_task(pair.send(waiting, body))
        else:
            other = asyncio.create_task(pair.send(waiting, body))
            await pair.until(waiting, lambda load: load["disaggregation"][name] == 1)
            answer = await pair.send(refusing, refused)
        assert answer.status in (400, 412), answer
        began = time.monotonic()
        failed = await asyncio.wait_for(other, 10.0)
        seconds = time.monotonic() - began
        assert failed.is_failure, failed
        assert seconds < LIMIT
    finally:
        await pair.send(refusing, {}, "/continue_generation")
    await pair.settled()
    call = pair.both(pair.body(prompt_of(2, 40), body["bootstrap_room"]))
    assert (await call[DECODE]).tokens == oracle.tokens(prompt_of(2, 40))
