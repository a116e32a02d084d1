"""Events of several ranks become those of one: in every order, the request ends once, and quiet only when all are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.disaggregation.base import (
    Event,
    FirstToken,
    KVArrived,
    KVFailed,
    KVQuiesced,
    KVSent,
    PeerReady,
    SessionStats,
)
from sglang_lite.disaggregation.rank_frames import (
    AbortKey,
    Command,
    OpenDecode,
    OpenPrefill,
    SendPages,
    decode_answer,
    decode_command,
    encode_answer,
    encode_command,
)
from sglang_lite.disaggregation.rank_merge import RankMerge
from sglang_lite.types import TransferParams

KEY = 7


@dataclass
class Rank:
    """A worker as its contract says; ``told`` waits for the core, ``asked`` for the worker."""

    told: list[Event] = field(default_factory=list)
    asked: int = 0
    is_ready: bool = False
    state: str = "live"

    @property
    def is_quiet(self) -> bool:
        return self.state == "quiet"

    def steps(self) -> list[Callable[[], None]]:
        """What may happen next."""
        steps: list[Callable[[], None]] = []
        if self.state == "live":
            steps += [self.fail_quietly, self.fail]
            steps.append(self.succeed if self.is_ready else self.get_ready)
        if self.state == "over":
            steps.append(self.rest)
        if self.asked:
            steps.append(self.take_abort)
        return steps

    def get_ready(self) -> None:
        self.is_ready = True
        self.told.append(PeerReady(KEY, 16))

    def succeed(self) -> None:
        self.state = "quiet"
        self.told.append(KVSent(KEY))

    def fail_quietly(self) -> None:
        self.state = "quiet"
        self.told.append(KVFailed(KEY, 500, "it failed", True, "engine"))

    def fail(self) -> None:
        self.state = "over"
        self.told.append(KVFailed(KEY, 500, "it failed", False, "peer_lost"))

    def rest(self) -> None:
        self.state = "quiet"
        self.told.append(KVQuiesced(KEY))

    def take_abort(self) -> None:
        self.asked -= 1
        if self.state == "live":
            self.state = "over"
        elif self.is_quiet:
            self.told.append(KVQuiesced(KEY))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 4))
def test_any_order_of_events(data: st.DataObject, size: int) -> None:
    merge = RankMerge(size)
    ranks = [Rank() for _ in range(size)]
    heard: list[Event] = []
    may_abort, was_aborted = True, False
    merge.open(KEY)

    def abort_all() -> None:
        for rank in ranks:
            rank.asked += 1

    def abort_by_core() -> None:
        nonlocal may_abort, was_aborted
        may_abort = False
        if merge.abort(KEY):
            was_aborted = True
            abort_all()

    def deliver(number: int) -> None:
        told, must_end = merge.take(number, ranks[number].told.pop(0))
        for event in told:
            quiet_now = not isinstance(event, PeerReady) and getattr(event, "quiesced", True)
            if quiet_now:
                assert all(rank.is_quiet for rank in ranks), event
        heard.extend(told)
        if must_end:
            abort_all()

    while True:
        steps: list[Callable[[], None]] = [step for rank in ranks for step in rank.steps()]
        steps += [lambda number=number: deliver(number) for number, rank in enumerate(ranks) if rank.told]
        if not steps:
            break
        if may_abort:
            steps.append(abort_by_core)
        data.draw(st.sampled_from(steps))()

    if heard and isinstance(heard[0], PeerReady):
        assert heard.pop(0) == PeerReady(KEY, 16)
    kinds = [type(event) for event in heard]
    if was_aborted:
        assert kinds == [KVQuiesced]
    elif kinds == [KVFailed]:
        assert isinstance(heard[0], KVFailed) and heard[0].quiesced
    elif kinds != [KVSent]:
        assert kinds == [KVFailed, KVQuiesced]
        assert isinstance(heard[0], KVFailed) and not heard[0].quiesced
    assert not merge.is_known(KEY)
    assert merge.num_quarantined == 0
    assert sum(merge.failures.values()) == (kinds != [KVSent])


def test_the_record_is_that_of_the_first_rank() -> None:
    merge = RankMerge(2)
    merge.open(KEY)
    assert merge.take(1, KVArrived(KEY, FirstToken(1))) == ([], False)
    assert merge.take(0, KVArrived(KEY, FirstToken(2))) == ([KVArrived(KEY, FirstToken(2))], False)


def test_the_shortest_prefix_is_what_all_ranks_have() -> None:
    merge = RankMerge(2)
    merge.open(KEY)
    merge.take(0, PeerReady(KEY, 32))
    assert merge.take(1, PeerReady(KEY, 16)) == ([PeerReady(KEY, 16)], False)


PARAMS = TransferParams("host", 8998, (1 << 63) - 1, 3, "rid")


@pytest.mark.parametrize(
    "command",
    [
        OpenPrefill(1, "r", PARAMS, 10),
        OpenDecode(1, "r", PARAMS, b"\1\0\0\0", 10, 4, ("first", 9)),
        SendPages(1, 2, b"", None),
        SendPages(1, 2, b"\1\0\0\0", FirstToken(3, 1, 2, 3, -0.5, ((-0.5, 3),), ())),
        AbortKey(5),
    ],
)
def test_commands_come_as_they_were(command: Command) -> None:
    assert decode_command(encode_command(command)) == command


@pytest.mark.parametrize(
    "answer",
    [
        PeerReady(1, 2),
        KVSent(1),
        KVArrived(1, FirstToken(3, 1, 2, 3, -0.5, ((-0.5, 3),), ())),
        KVFailed(1, 500, "why", False, "engine"),
        KVQuiesced(1),
        SessionStats(bytes=5, spans=2),
    ],
)
def test_answers_come_as_they_were(answer: Event | SessionStats) -> None:
    assert decode_answer(encode_answer(answer)) == answer
