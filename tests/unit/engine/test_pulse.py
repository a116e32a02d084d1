"""A core that is there and silent: noticed, its requests ended, and served again when it goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sglang_lite.engine.async_engine import AsyncEngine
from sglang_lite.engine.client import EngineClient
from sglang_lite.engine.control_calls import WEIGHTS_TIMEOUT
from sglang_lite.engine.pulse import Patience, Pulse
from sglang_lite.engine.replicas import ReplicaClient
from sglang_lite.types import RequestError
from tests.unit.engine.conftest import ask, run_to_end, start_engine, until, until_idle

LOOKS = 3
"""As ``watchdog_timeout``: with one that short, requests are refused and ended at the same look."""


@asynccontextmanager
async def frozen(process_id: int) -> AsyncIterator[None]:
    os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)


def test_looks_without_a_word_are_counted_until_there_is_one() -> None:
    pulse = Pulse()
    assert [pulse.look(excused=False) for _ in range(3)] == [0, 1, 2]
    assert pulse.look(excused=True) == 2
    pulse.heard = True
    assert [pulse.look(excused=False) for _ in range(2)] == [0, 1]


def test_the_watchdog_says_how_long_clients_wait() -> None:
    usual, short, never = Patience.of(300.0), Patience.of(2.5), Patience.of(0.0)
    assert (usual.quiet, usual.end) == (20, 300)
    assert (short.quiet, short.end) == (3, 3)
    assert (never.quiet, never.end) == (20, 0)
    assert [never.is_over(looks) for looks in (0, 19, 10_000)] == [False] * 3
    assert [usual.is_quiet(looks) for looks in (0, 19, 20)] == [False, False, True]


async def test_a_frozen_core_ends_its_requests_and_serves_again_when_it_goes_on(chain_model: Path) -> None:
    async with await start_engine(chain_model, "1", watchdog_timeout=LOOKS) as engine:
        assert engine.look()
        tasks = [asyncio.create_task(run_to_end(engine, ask(f"r{index}", "A", None))) for index in range(3)]
        await until(lambda: engine.num_live == 3)
        assert engine.info.process_id is not None
        async with frozen(engine.info.process_id):
            await until(lambda: not engine.look(), 60)
            for output in await asyncio.gather(*tasks):
                assert output.finish_reason is not None
                assert (output.finish_reason.type, output.finish_reason.status_code) == ("abort", 503)
                assert "said nothing" in str(output.finish_reason.message)
            with pytest.raises(RequestError, match="said nothing") as refused:
                await run_to_end(engine, ask("new"))
            assert refused.value.status == 503
            assert engine.is_alive and not engine.look()
        await until(engine.look, 60)
        assert (await run_to_end(engine, ask("after", "A", 3))).text == "BCD"
        await until_idle(engine)  # what was given up is not generated to nobody


async def test_a_frozen_replica_gets_no_requests_until_it_goes_on(chain_model: Path) -> None:
    async with await start_engine(chain_model, "5", dp_size=2, watchdog_timeout=LOOKS) as engine:
        client = engine._client
        assert isinstance(client, ReplicaClient)
        first = client.process_ids[0]
        assert first is not None
        victim, other = ask("victim", "A", None), ask("other", "A", None)
        victim.replica, other.replica = 0, 1
        tasks = [asyncio.create_task(run_to_end(engine, request)) for request in (victim, other)]
        await until(lambda: engine.num_live == 2)
        async with frozen(first):
            await look_until(engine, tasks[0].done)
            reason = (await tasks[0]).finish_reason
            assert reason is not None
            assert (reason.status_code, "replica 0: the engine core" in str(reason.message)) == (503, True)
            assert not tasks[1].done()
            for index in range(4):
                assert (await run_to_end(engine, ask(f"m{index}", "A", 3))).text == "BCD"
            assert not engine.lost_replicas
        await look_until(engine, lambda: client._loads.alive == [0, 1])
        again = ask("again", "A", 3)
        again.replica = 0
        assert (await run_to_end(engine, again)).text == "BCD"
        await engine.abort_all()
        await asyncio.gather(*tasks)


async def look_until(engine: AsyncEngine, condition: Callable[[], bool]) -> None:
    """Look until ``condition`` holds, each time behind a word of replica 1."""
    client = engine._client
    assert isinstance(client, ReplicaClient)
    while not condition():
        await until(lambda: client._clients[1]._pulse.heard, 60)
        assert engine.look()
        await asyncio.sleep(0)


async def test_a_core_that_loads_weights_is_not_silent() -> None:
    client = EngineClient()
    try:
        call = asyncio.create_task(client._exchange(lambda call: [b""], WEIGHTS_TIMEOUT))
        await asyncio.sleep(0)
        assert [client.look() for _ in range(3)] == [0, 0, 0]
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert client.look() == 1
    finally:
        await client.close()
