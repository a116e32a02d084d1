"""The engine dies, a signal comes, or a front fails while the further fronts of a server start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_lite.server import run
from sglang_lite.server.front_workers import LOST, FrontWorkers
from sglang_lite.types import StartupError


class Starting:
    """Fronts that start when ``ready`` is set."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.cancelled = False

    async def start(self, messages: object) -> None:
        try:
            await self.ready.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def living_engine() -> Any:
    return SimpleNamespace(is_alive=True, failure=None)


async def test_the_death_of_the_engine_ends_the_start(caplog: pytest.LogCaptureFixture) -> None:
    workers, engine = Starting(), living_engine()
    starting = asyncio.create_task(run._start_fronts(workers, [], engine, run.ShutdownSignals()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not starting.done()
    engine.is_alive, engine.failure = False, "engine core was killed by signal 9 (SIGKILL)"
    async with asyncio.timeout(30):
        assert not await starting
    assert workers.cancelled
    assert "died while the other front processes started: engine core was killed by signal 9" in caplog.text


async def test_a_signal_ends_the_start_and_fronts_that_serve_go_on() -> None:
    workers, signals = Starting(), run.ShutdownSignals()
    signals.notify()
    assert not await run._start_fronts(workers, [], living_engine(), signals)  # type: ignore[arg-type]
    workers.ready.set()
    assert await run._start_fronts(workers, [], living_engine(), run.ShutdownSignals())  # type: ignore[arg-type]


async def test_a_front_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: FrontWorkers, messages: object) -> None:
        raise StartupError("front process 7 ended before it was ready; its messages say why")

    monkeypatch.setattr(FrontWorkers, "start", refuse)
    with pytest.raises(StartupError, match="front process 7"):
        await run._start_fronts(FrontWorkers(), [], living_engine(), run.ShutdownSignals())


def test_fronts_hear_why_the_server_ends() -> None:
    class Pipe(bytearray):
        write = bytearray.extend

        def is_closing(self) -> bool:
            return False

    pipe = Pipe()
    workers: Any = FrontWorkers()
    workers._processes.append(SimpleNamespace(stdin=pipe))
    workers.lose_server("front process 12 of the server\nended by itself")
    assert bytes(pipe) == LOST + b"front process 12 of the server ended by itself\n"
