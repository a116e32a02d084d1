"""What several fronts know together: two tables over one file stand for two processes."""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path

import pytest

from sglang_lite.engine import shared_claims
from sglang_lite.engine.shared_claims import SharedClaims
from sglang_lite.types import RequestError


@pytest.fixture
def pair(tmp_path: Path) -> tuple[SharedClaims, SharedClaims]:
    return SharedClaims.create(str(tmp_path)), SharedClaims.attach(str(tmp_path))


def test_an_id_is_taken_for_all_until_it_is_given_back(pair: tuple[SharedClaims, SharedClaims]) -> None:
    first, second = pair
    assert first.claim("same")
    assert not second.claim("same")
    assert second.claim("other")
    second.release("nobody's")
    first.release("same")
    assert second.claim("same")


def test_against_a_set_in_a_table_that_is_nearly_full(
    pair: tuple[SharedClaims, SharedClaims], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_claims, "_PLACES", 67)
    monkeypatch.setattr(shared_claims, "MAX_CLAIMS", 60)
    draw = random.Random(5)
    taken: set[str] = set()
    for _ in range(20_000):
        table, name = draw.choice(pair), f"rid-{draw.randrange(90)}"
        if name in taken and draw.random() < 0.6:
            table.release(name)
            taken.remove(name)
        elif name in taken or len(taken) < 60:
            assert table.claim(name) == (name not in taken)
            taken.add(name)
        else:
            with pytest.raises(RequestError, match="60 sequences are in flight") as caught:
                table.claim(name)
            assert caught.value.status == 503
    for name in taken:
        assert not pair[0].claim(name)
        pair[1].release(name)
    assert all(pair[0].claim(f"new-{number}") for number in range(60))


def test_requests_are_counted_together(pair: tuple[SharedClaims, SharedClaims]) -> None:
    first, second = pair
    assert first.enter(2)
    assert second.enter(2)
    assert not first.enter(2)
    assert first.enter(None)
    first.leave()
    second.leave()
    assert second.enter(2)
    second.close()
    second.leave()
    second.release("after the end")
    assert not first.enter(2)


def test_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    table = SharedClaims.create(str(tmp_path))
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        admitted = pool.starmap(_hammer, [(str(tmp_path), number) for number in range(3)])
    # Each name was claimed by exactly one of them, and what all counted was taken back.
    assert sorted(name for names in admitted for name in names) == sorted(f"rid-{number}" for number in range(500))
    assert table.enter(1)
    assert not table.enter(1)


def _hammer(directory: str, seed: int) -> list[str]:
    table = SharedClaims.attach(directory)
    names = [f"rid-{number}" for number in range(500)]
    random.Random(seed).shuffle(names)
    mine = []
    for name in names:
        if table.enter(2):
            table.leave()
        if table.claim(name):
            mine.append(name)
    return mine
