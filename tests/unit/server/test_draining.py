"""How long a server that ends waits: a prefill server as long as something moves, others as long as they may."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from sglang_lite.disaggregation.base import SessionStats
from sglang_lite.engine.info import LoadSnapshot
from sglang_lite.server import draining
from sglang_lite.server.context import ServerContext
from sglang_lite.server.draining import wait_for_requests
from sglang_lite.types import RequestError
from tests.support.fake_engine import FakeEngine


class Moving(FakeEngine):
    """Reports progress as often as ``moves`` says, then none."""

    def __init__(self, moves: int, **options: Any) -> None:
        super().__init__(**options)
        self.moves = moves
        self.looks = 0
        self.moved = asyncio.Event()

    async def replica_loads(self) -> list[tuple[int, LoadSnapshot]]:
        self.looks += 1
        moved = min(self.looks, self.moves)
        if moved == self.moves:
            self.moved.set()
        return [(0, msgspec.structs.replace(self.load, transfers=SessionStats(spans=moved)))]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "PREFILL_PATIENCE", 0.05)
    monkeypatch.setattr(draining, "_LOOK_SECONDS", 0.001)


async def test_a_prefill_server_waits_while_pages_move() -> None:
    engine = Moving(10, disaggregation_mode="prefill")
    context = ServerContext(engine)
    with context.generation():
        waiting = asyncio.create_task(wait_for_requests(context, 60))
        await asyncio.wait_for(engine.moved.wait(), 10)
        await asyncio.wait_for(waiting, 10)
    assert engine.looks >= 10


async def test_it_does_not_wait_for_more_than_its_requests() -> None:
    engine = Moving(1_000_000, disaggregation_mode="prefill")
    context = ServerContext(engine)
    with context.generation():
        waiting = asyncio.create_task(wait_for_requests(context, 60))
        while engine.looks < 20:
            await asyncio.sleep(0.01)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 10)


async def test_a_step_that_takes_longer_than_the_patience_is_progress() -> None:
    engine = Moving(1, disaggregation_mode="prefill")
    engine.load = msgspec.structs.replace(engine.load, num_running=1, num_prefilling=1)
    context = ServerContext(engine)
    with context.generation():
        waiting = asyncio.create_task(wait_for_requests(context, 60))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        engine.load = msgspec.structs.replace(engine.load, paused=True)
        await asyncio.wait_for(waiting, 10)


async def test_its_time_is_limited_all_the_same() -> None:
    engine = Moving(1_000_000, disaggregation_mode="prefill")
    context = ServerContext(engine)
    with context.generation():
        await asyncio.wait_for(wait_for_requests(context, 0.1), 10)


async def test_a_core_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Moving(1, disaggregation_mode="prefill")

    async def refuse() -> list[tuple[int, LoadSnapshot]]:
        raise RequestError("the engine is gone", status=503)

    monkeypatch.setattr(engine, "replica_loads", refuse)
    context = ServerContext(engine)
    with context.generation():
        await asyncio.wait_for(wait_for_requests(context, 60), 10)


async def test_other_servers_wait_for_requests_without_progress() -> None:
    engine = Moving(1)
    context = ServerContext(engine)
    with context.generation():
        waiting = asyncio.create_task(wait_for_requests(context, 60))
        await asyncio.sleep(0.2)
        assert not waiting.done() and not engine.looks
    await asyncio.wait_for(waiting, 10)
