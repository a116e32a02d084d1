"""Workers of servers with different tensor-parallel sizes: every decode rank gets its heads, whoever has them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from sglang_lite.disaggregation.base import FirstToken, KVArrived, KVFailed, KVQuiesced, KVSent, PeerReady
from sglang_lite.disaggregation.ranked_sessions import (
    FollowingSessions,
    RankedDecodeSessions,
    RankedPrefillSessions,
)
from sglang_lite.transfer.factory import open_transport
from sglang_lite.types import TransferParams
from tests.support.session_pair import PAGE_SIZE, Side
from tests.support.session_ranks import NUM_PAGES, Servers


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    with contextlib.closing(Servers(*request.param)) as made:
        yield made


SIZES = [(1, 2, 4), (2, 1, 4), (2, 2, 4), (4, 2, 2), (2, 4, 2), (4, 1, 1), (1, 4, 2), (1, 2, 0), (2, 1, 0)]


@pytest.mark.parametrize("servers", SIZES, ids=lambda sizes: "p{}-d{}-h{}".format(*sizes), indirect=True)
def test_every_rank_gets_its_heads(servers: Servers) -> None:
    source, target = [3, 9, 0], [5, 1, 14]
    for turn in (1, 2):
        servers.open(turn, 9, 3, target)
        for side in servers.prefill:
            assert side.wait(turn, (PeerReady,)) == PeerReady(turn)
        servers.send(turn, source)
        for side in servers.decode:
            assert side.wait(turn) == KVArrived(turn, FirstToken(turn))
        for side in servers.prefill:
            assert side.wait(turn) == KVSent(turn)
        expected = np.zeros_like(servers.whole)
        expected[target] = servers.whole[source]
        for rank, side in enumerate(servers.decode):
            assert (side.pool == servers.part(expected, rank, len(servers.decode))).all()
            side.pool[:] = 0


@pytest.mark.parametrize("servers", [(2, 1, 4), (2, 1, 0), (1, 2, 4)], indirect=True)
def test_a_rank_that_fails_takes_the_session_with_it(servers: Servers) -> None:
    """One rank of the larger side gives up; the other side hears of it, and nothing is written afterwards."""
    servers.open(1, 9, 2, [5, 1])
    for side in servers.prefill:
        side.wait(1, (PeerReady,))
    many, few = sorted((servers.prefill, servers.decode), key=len, reverse=True)
    began = time.monotonic()
    many[1].worker.abort(1)
    assert many[1].wait(1) == KVQuiesced(1)
    failed = few[0].wait(1)
    assert isinstance(failed, KVFailed) and "gave the request up" in failed.message
    assert time.monotonic() - began < 1.0
    many[0].worker.abort(1)
    many[0].wait(1)
    assert failed.quiesced or few[0].wait(1) == KVQuiesced(1)
    for side in (*servers.prefill, *servers.decode):
        side.wait_idle()


def test_a_damaged_slice_is_found() -> None:
    with contextlib.closing(Servers(2, 1, 4)) as servers:
        pool, until = servers.decode[0].pool, time.monotonic() + 5
        servers.open(2, 9, 2, [6, 7])
        for side in servers.prefill:
            side.wait(2, (PeerReady,))
        servers.prefill[0].worker.send(2, 0, np.array([3, 4], dtype=np.int32), FirstToken(1))
        servers.prefill[1].worker.send(2, 0, np.array([3], dtype=np.int32))
        while not (pool[6, :, 2:] == servers.prefill[1].pool[3]).all():
            assert time.monotonic() < until
        pool[6, 1, 3, 0] ^= 1
        servers.prefill[1].worker.send(2, 1, np.array([4], dtype=np.int32), FirstToken(1))
        failed = servers.decode[0].wait(2)
        assert isinstance(failed, KVFailed) and failed.reason == "corrupt" and "1 of 2 pages" in failed.message


@pytest.mark.parametrize("engine", ["mooncake_tcp", "nixl"])
def test_slices_over_the_engines(engine: str) -> None:
    """More rows than spans may be under way at once."""
    with contextlib.closing(Servers(1, 2, 4, lambda host: open_transport(engine, host=host))) as servers:
        pages = list(range(NUM_PAGES))
        servers.open(1, 9, NUM_PAGES, pages)
        servers.prefill[0].wait(1, (PeerReady,))
        servers.send(1, pages)
        for side in servers.decode:
            assert isinstance(side.wait(1, seconds=20.0), KVArrived)
        for rank, side in enumerate(servers.decode):
            assert (side.pool == servers.part(servers.whole, rank, 2)).all()
        assert servers.prefill[0].wait(1) == KVSent(1)
        sent = servers.prefill[0].worker.stats()
        assert sent.spans == 2 * NUM_PAGES * 6
        assert sent.bytes == servers.whole.nbytes


class Channel:
    """From one worker to those that follow it, which are in this process too."""

    def __init__(self, sides: list[Side]) -> None:
        self.num_ranks = len(sides)
        self._listener: Callable[[int, bytes], None] = lambda rank, data: None
        self.followers = [self._follow(rank, side) for rank, side in enumerate(sides) if rank]

    def _follow(self, rank: int, side: Side) -> FollowingSessions:
        return FollowingSessions(side.worker, lambda data: self._listener(rank, data))

    def send_command(self, command: bytes) -> None:
        for follower in self.followers:
            follower.run(command)

    def listen(self, listener: Callable[[int, bytes], None]) -> None:
        self._listener = listener


class Replicas:
    """A prefill and a decode server of several ranks, as their cores see them."""

    def __init__(self, prefill_size: int, decode_size: int) -> None:
        self.servers = Servers(prefill_size, decode_size, 4, start=False)
        prefill, decode = Channel(self.servers.prefill), Channel(self.servers.decode)
        self.prefill = Side(RankedPrefillSessions(self.servers.prefill[0].worker, prefill), self.servers.whole)
        self.decode = Side(RankedDecodeSessions(self.servers.decode[0].worker, decode), self.servers.whole)
        for side in (self.prefill, self.decode):
            side.worker.start()
        until = time.monotonic() + 10
        while not all(side.worker.is_registered for side in self.servers.prefill):
            assert time.monotonic() < until
            time.sleep(0.005)

    def open(self, key: int, room: int, target: list[int]) -> None:
        """On both sides."""
        params = TransferParams("127.0.0.1", self.servers.site.site.port, room)
        where = np.array(target, dtype=np.int32)
        self.prefill.worker.open(key, f"r{room}", params, len(target) * PAGE_SIZE)
        self.decode.worker.open(key, f"r{room}", params, where, len(target) * PAGE_SIZE, 0)

    def run(self, key: int, room: int) -> None:
        """A whole session, in two chunks."""
        source, target = [key, key + 1, 0], [5, 1, 14]
        self.open(key, room, target)
        assert self.prefill.wait(key, (PeerReady,)) == PeerReady(key)
        self.prefill.worker.send(key, 0, np.array(source[:1], dtype=np.int32))
        self.prefill.worker.send(key, 1, np.array(source[1:], dtype=np.int32), FirstToken(key))
        assert self.decode.wait(key) == KVArrived(key, FirstToken(key))
        assert self.prefill.wait(key) == KVSent(key)
        for rank, side in enumerate(self.servers.decode):
            expected = self.servers.part(self.servers.whole, rank, len(self.servers.decode))
            assert (side.pool[target] == expected[source]).all()

    def close(self) -> None:
        self.servers.close()


@pytest.fixture(params=[(2, 2), (4, 2), (1, 4)], ids=lambda sizes: "p{}-d{}".format(*sizes))
def replicas(request: pytest.FixtureRequest) -> Iterator[Replicas]:
    with contextlib.closing(Replicas(*request.param)) as made:
        yield made


def test_a_core_sees_its_ranks_as_one(replicas: Replicas) -> None:
    for key in (1, 2, 3):
        replicas.run(key, 9)
    until = time.monotonic() + 5
    moved = 3 * 3 * replicas.servers.whole[0].nbytes
    while replicas.prefill.worker.stats().bytes != moved:  # other ranks tell theirs every now and then
        assert time.monotonic() < until, replicas.prefill.worker.stats()
        time.sleep(0.01)
    replicas.prefill.worker.abort(1)
    assert replicas.prefill.wait(1) == KVQuiesced(1)


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("is_ready", [False, True])
def test_a_core_that_gives_up_ends_it_on_all_ranks_of_both_sides(replicas: Replicas, who: str, is_ready: bool) -> None:
    replicas.open(1, 9, [5, 1])
    if is_ready:
        replicas.prefill.wait(1, (PeerReady,))
        replicas.prefill.worker.send(1, 0, np.array([3], dtype=np.int32))
    own, other = (replicas.prefill, replicas.decode) if who == "prefill" else (replicas.decode, replicas.prefill)
    own.worker.abort(1)
    assert own.wait(1) == KVQuiesced(1)
    failed = other.wait(1)
    assert isinstance(failed, KVFailed) and "gave the request up" in failed.message
    assert failed.quiesced or other.wait(1) == KVQuiesced(1)
    for side in (*replicas.servers.prefill, *replicas.servers.decode):
        side.wait_idle()
    for side in replicas.servers.decode:
        side.pool[:] = 0
    replicas.run(2, 10)
    assert own.worker.stats().failures == {"aborted": 1}
    assert own.worker.stats().quarantined == 0


def test_a_request_that_decode_refuses_ends_on_all_prefill_ranks(replicas: Replicas) -> None:
    params = TransferParams("127.0.0.1", replicas.servers.site.site.port, 9)
    replicas.prefill.worker.open(1, "r9", params, 8)
    replicas.decode.worker.refuse("r9", params, "the queue is full")
    failed = replicas.prefill.wait(1, seconds=3.0)
    assert isinstance(failed, KVFailed) and "the queue is full" in failed.message
    assert failed.quiesced or replicas.prefill.wait(1) == KVQuiesced(1)
    replicas.run(2, 9)


def test_a_room_in_use_is_refused_on_all_ranks(replicas: Replicas) -> None:
    replicas.open(1, 9, [5, 1])
    params = TransferParams("127.0.0.1", replicas.servers.site.site.port, 9)
    replicas.prefill.worker.open(2, "again", params, 8)
    failed = replicas.prefill.wait(2)
    assert isinstance(failed, KVFailed) and failed.status == 400
    assert failed.quiesced or replicas.prefill.wait(2) == KVQuiesced(2)
    replicas.prefill.wait(1, (PeerReady,))
    replicas.prefill.worker.send(1, 0, np.array([3, 4], dtype=np.int32), FirstToken(1))
    assert replicas.decode.wait(1) == KVArrived(1, FirstToken(1))
    assert replicas.prefill.wait(1) == KVSent(1)


def test_a_rank_that_dies_without_a_word_fails_the_other_side(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = replicas.servers.decode
    replicas.open(1, 9, [5, 1])
    replicas.prefill.wait(1, (PeerReady,))
    replicas.prefill.worker.send(1, 0, np.array([3], dtype=np.int32))
    monkeypatch.setattr(ranks[-1].worker, "on_stop", lambda: None)
    ranks[-1].worker.close(0.1)
    failed = replicas.prefill.wait(1, seconds=3.0)
    assert isinstance(failed, KVFailed) and failed.reason == "peer_lost"
    assert failed.quiesced or replicas.prefill.wait(1) == KVQuiesced(1)
    for side in replicas.servers.prefill:
        side.wait_idle()
