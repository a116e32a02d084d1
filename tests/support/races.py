"""Races of the router whose hedge is due when a test says so."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from sglang_lite.router.race import Race
from tests.support.null_workers import RouterUnderTest

NEVER = 1000.0
"""Delay of a hedge that only ``Races.fire`` sends."""


class Races:
    """The races that began, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begun = self.begun = list[Race[Any]]()
        run = Race.run

        def recorded(race: Race[Any], delay: float | None) -> Any:
            begun.append(race)
            return run(race, delay)

        monkeypatch.setattr(Race, "run", recorded)

    def fire(self) -> None:
        """The hedge of the last race is due."""
        self.begun[-1].fire()


async def soon(condition: Any) -> None:
    """Wait until ``condition()`` holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def result_counts(router: RouterUnderTest) -> dict[str, float]:
    """Hedges by result, and requests without one by reason."""
    text = router.context.metrics.text().decode()
    names = ("sgl_router_hedges_total{", "sgl_router_hedges_skipped_total{")
    lines = [line.split() for line in text.splitlines() if line.startswith(names)]
    return {name.split('"')[1]: float(value) for name, value in lines if float(value)}


async def check_results(router: RouterUnderTest, **expected: float) -> None:
    """Hedges are counted when their request is over, which a client may know a moment before."""
    with suppress(TimeoutError):
        await soon(lambda: result_counts(router) == expected)
    assert result_counts(router) == expected


async def check_idle(router: RouterUnderTest) -> None:
    """Nothing of any request is left."""
    await soon(lambda: not router.context.leases.total)
    assert [worker.load for worker in router.context.registry.targets() if worker.load] == []
    assert not router.context.scopes
