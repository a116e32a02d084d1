"""Whether a decode worker notices that another process is behind a prefill server's address."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sglang_lite.disaggregation import prefill_directory
from sglang_lite.disaggregation.bootstrap_client import HandshakeError, RankAddress, TopologyInfo
from sglang_lite.disaggregation.prefill_directory import PrefillDirectory
from sglang_lite.types import TransferParams

PARAMS = TransferParams("h", 1, 7, rid="r")
REFUSED = HandshakeError("Cannot connect")


class Scripted:
    """A client of a bootstrap server: instances that are there, or why nobody is."""

    def __init__(self, *answers: list[str] | HandshakeError) -> None:
        self._answers = list(answers)

    async def topology(self, host: str, port: int) -> TopologyInfo:
        answer = self._answers.pop(0)
        if isinstance(answer, HandshakeError):
            raise answer
        return TopologyInfo(1, 1, instances=answer)

    async def rank(self, host: str, port: int, dp_rank: int, rank: int) -> RankAddress:
        return RankAddress("127.0.0.1", 1)


class Memory:
    heads = page_size = dtype = layout = None


async def lost_after(monkeypatch: pytest.MonkeyPatch, *answers: list[str] | HandshakeError) -> list[float]:
    """What is told over calls that each ask again."""
    monkeypatch.setattr(prefill_directory, "FRESH_SECONDS", -1.0)
    monkeypatch.setattr(prefill_directory, "_QUICK_ATTEMPTS", 1)
    told: list[float] = []
    client: Any = Scripted(*answers)
    memory: Any = Memory()
    directory = PrefillDirectory(client, memory, 0, 1, True, lambda host, port, until: told.append(until))
    for answer in answers:
        if isinstance(answer, HandshakeError):
            with pytest.raises(HandshakeError):
                await directory.find(PARAMS, 0.0, must_fit=False)
            directory.forget("h", 1)  # as whoever asked does
        else:
            await directory.find(PARAMS, 0.0, must_fit=False)
    return told


async def test_another_process_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    assert len(await lost_after(monkeypatch, ["a"], ["a"], ["b"], ["b"])) == 1
    [until] = await lost_after(monkeypatch, ["a"], REFUSED, ["b"])
    assert began < until < time.monotonic()
    [until] = await lost_after(monkeypatch, REFUSED, ["b"])  # who came before it was there
    assert began < until < time.monotonic()


@pytest.mark.parametrize(
    "answers",
    [
        (["a"], ["a", "b"], ["b"]),  # one replica after the other joins or leaves
        (["a"], REFUSED, ["a"]),  # the network was away
        ([], ["a"]),  # SGLang's servers tell none
        (["a"], [], ["a"]),
    ],
)
async def test_the_same_process_is_not_lost(monkeypatch: pytest.MonkeyPatch, answers: Any) -> None:
    assert await lost_after(monkeypatch, *answers) == []


async def test_who_came_while_nobody_was_there_is_lost_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other half of such a request was refused: it is not at the new process."""
    monkeypatch.setattr(prefill_directory, "FRESH_SECONDS", -1.0)
    told: list[float] = []
    client: Any = Scripted(["a"], ["b"])
    memory: Any = Memory()
    directory = PrefillDirectory(client, memory, 0, 1, True, lambda host, port, until: told.append(until))
    await directory.find(PARAMS, 0.0, must_fit=False)
    came = time.monotonic()
    directory.note_gone("h", 1)  # a failed look at its health
    await directory.find(PARAMS, 0.0, must_fit=False)
    assert told[0] >= came
