"""Random requests, aborts, pauses, flushes and broken sessions over a prefill and a decode core with tight pools."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sglang_lite.engine.frames import Keys
from sglang_lite.engine.messages import Abort, AbortAll, Finish, Flush, Pause, Resume
from sglang_lite.types import FinishCode
from tests.support.played_pair import PlayedSide, Wire, expected_tokens

STEPS = 150


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_storm(fallback: bool, policy: str) -> None:
    """Whatever happens, pages have one owner, outputs are right as far as they go, and nobody waits for ever."""
    for seed in range(12):
        _run(random.Random(seed), fallback, policy)


def _run(chance: random.Random, fallback: bool, policy: str) -> None:
    wire = Wire(chance)
    pages = chance.choice((16, 18, 24, 40))
    sides = [
        PlayedSide(wire, kind, pages if kind == "decode" else chance.choice((16, 24)), fallback=fallback, policy=policy)
        for kind in ("prefill", "decode")
    ]
    prefill, decode = sides

    def meanwhile() -> None:
        """A step of the decode side takes as long as many of the other."""
        for _ in range(chance.choice((0, 0, 2, 12))):
            wire.step(0.9)
            prefill.step()

    decode.executor.meanwhile = meanwhile
    prompts: dict[int, tuple[list[int], int]] = {}
    disturbed: set[int] = set()
    calm = chance.random() < 0.3
    for _ in range(STEPS):
        if chance.random() < 0.25:
            key = len(prompts) + 1
            shared = [1, 2, 3, 4, 5, 6, 7, 8][: chance.choice((0, 4, 8))]
            prompt = shared + [chance.randrange(30) for _ in range(chance.randint(1, 40))]
            prompts[key] = prompt, chance.choice((0, 1, 2, 6, 15))
            for side in chance.sample(sides, 2):
                if chance.random() < 0.97:
                    side.submit(key, *prompts[key], priority=chance.randint(-2, 2))
                else:
                    disturbed.add(key)  # its partner never comes
        if not calm:
            _disturb(chance, wire, sides, prompts, disturbed)
        wire.step()
        for side in sides:
            if chance.random() < 0.9:
                side.step()
    for side in sides:
        side.put(Resume(0, 0))
        lonely = [key for key in disturbed if key not in side.ends]
        side.put(Keys(Abort(0, 0), np.array(lonely, np.int64)))
    for _ in range(600):
        wire.step(0.9)
        for side in sides:
            side.step()
    for side in sides:
        assert side.used_pages == 0, f"pages are held: {side.scheduler.stats()}"
        assert not side.scheduler.held()
        side.put(Flush(0, 0, 0.0))
        side.step()
        assert side.scheduler.stats().cached_pages == 0
    for key, (prompt, count) in prompts.items():
        told, end = decode.tokens.get(key, []), decode.ends.get(key)
        assert told == expected_tokens(prompt, len(told)), key
        if end in (FinishCode.LENGTH, FinishCode.STOP_TOKEN):
            assert len(told) == count
        assert prefill.tokens.get(key, []) == expected_tokens(prompt, len(prefill.tokens.get(key, [])))
        if key not in disturbed:
            assert end is not None, f"request {key} has no end on the decode side"
            assert key in prefill.ends, f"request {key} has no end on the prefill side"
            assert not calm or end in (FinishCode.LENGTH, FinishCode.QUEUE_FULL, FinishCode.TOO_LONG, FinishCode.ERROR)


def _disturb(
    chance: random.Random, wire: Wire, sides: list[PlayedSide], prompts: dict[int, tuple[list[int], int]],
    disturbed: set[int],
) -> None:  # fmt: skip
    side = chance.choice(sides)
    match chance.randrange(24):
        case 0 | 1 if prompts:
            key = chance.choice(list(prompts))
            side.put(Keys(Abort(0, 0), np.array([key], np.int64)))
        case 2 if prompts and side is sides[1]:
            running = [key for key in side.tokens if key not in side.ends]
            if running:  # a stop string was found
                side.put(Keys(Finish(), np.array(running[:1], np.int64)))
                disturbed.add(running[0])
        case 3:
            wire.lose()
        case 4:
            side.put(Pause(0, 0, chance.choice(("abort", "retract", "in_place"))))
        case 5 | 6 | 7:
            side.put(Resume(0, 0))
        case 8:
            side.put(Flush(0, 0, 0.0))
        case 9 if chance.random() < 0.2:
            side.put(AbortAll(0, 0))
        case _:
            pass
