"""Words that are lost with a connection, come late, or are said in somebody else's name: sessions go on, or end."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from sglang_lite.disaggregation import frames as wire
from sglang_lite.disaggregation.base import FirstToken, KVArrived, KVFailed, KVQuiesced, KVSent, PeerReady
from sglang_lite.disaggregation.links import Link
from sglang_lite.disaggregation.states import State
from sglang_lite.transfer import tcp_receiver
from sglang_lite.transfer.base import Description
from tests.support.session_pair import FAST, PAGE_SIZE, Pair, say

NOBODY = "f" * 32


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def _pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def _begin(pair: Pair, room: int) -> None:
    pair.open_prefill(room, room, 2 * PAGE_SIZE)
    pair.open_decode(room, room, [1, 2], 2 * PAGE_SIZE)
    pair.prefill.wait(room, (PeerReady,))


def _end(pair: Pair, room: int) -> None:
    pair.prefill.worker.send(room, 0, _pages(3, 4), FirstToken(room))
    assert pair.decode.wait(room) == KVArrived(room, FirstToken(room))
    assert pair.prefill.wait(room) == KVSent(room)
    assert (pair.decode.pool[[1, 2]] == pair.prefill.pool[[3, 4]]).all()


def _ask_as(pair: Pair, instance: str, port: int) -> list[bytes]:
    return wire.Request(5, "127.0.0.1", port, instance, _pages(0), 1, 0, 9).frames()


def test_what_is_said_to_the_process_before(pair: Pair) -> None:
    """The same room, tried again after a restart at the same address: the first attempt of both processes."""
    _begin(pair, 7)
    instance = pair.prefill.worker.instance
    record = wire.AuxRecord(FirstToken(99), 2, 1024, [1, 2])
    late = [wire.Aux(7, 0, 1, instance, record).frames(), wire.AbortAck(7, 0, 1, instance).frames()]
    say(pair.decode, [*late, wire.Status(7, State.FAILED, 0, 1, instance, "engine", "its process is gone").frames()])
    _end(pair, 7)


def test_an_end_that_was_lost_on_the_way(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection broke with the message in it. The decode side asks again, long before its time is over."""
    _begin(pair, 7)
    lost: list[list[bytes]] = []
    send = Link.send

    def lose_the_end(link: Link, frames: list[bytes]) -> bool:
        if not lost and len(frames) == len(wire.Status(0, State.FAILED, 0, 0).frames()) and frames[1] == b"0":
            lost.append(frames)
            return True
        return send(link, frames)

    monkeypatch.setattr(Link, "send", lose_the_end)
    pair.prefill.worker.abort(7)
    assert pair.prefill.wait(7) == KVQuiesced(7)
    failed = pair.decode.wait(7)
    assert lost and isinstance(failed, KVFailed) and failed.reason == "peer_failed"
    assert failed.quiesced or pair.decode.wait(7) == KVQuiesced(7)
    pair.run(8, 7, [1], [2])


def test_connections_that_made_room_for_others() -> None:
    """Whoever asks from many addresses takes no connection of a session, and none that is needed later."""
    pair = Pair(dataclasses.replace(FAST, max_sockets=3))
    try:
        pair.run(1, 1, [1], [2])
        say(pair.prefill, [_ask_as(pair, f"{number:032}", 9) for number in range(20)])
        _begin(pair, 7)
        say(pair.prefill, [_ask_as(pair, f"{number:032}", 9) for number in range(20, 40)])
        _end(pair, 7)
        assert len(pair.prefill.worker.links._links) <= 3
    finally:
        pair.close()


def test_a_name_that_somebody_made_up_does_not_bury_who_lives(pair: Pair) -> None:
    """A port has one owner, but that is the one who still talks."""
    _begin(pair, 7)
    say(pair.prefill, [_ask_as(pair, NOBODY, pair.decode.worker.port)])
    pair.prefill.worker.open(8, "behind it", pair.params(8), 4)
    _end(pair, 7)


def test_a_description_of_somebody_else(pair: Pair) -> None:
    """Whoever registers cannot change where the pages of another decode server go."""
    pair.run(1, 1, [1], [2])
    worker = pair.decode.worker
    told = msgspec.msgpack.decode(worker.transport.describe(), type=Description)
    false = msgspec.msgpack.encode(msgspec.structs.replace(told, port=1, regions=[]))
    page_bytes = worker.memory.page_bytes
    for instance, description in ((NOBODY, false), (NOBODY, b"\xc1")):
        register = wire.Register("127.0.0.1", worker.port, instance, (0,), 0, 1, page_bytes, description)
        say(pair.prefill, [register.frames()])
    pair.run(2, 2, [1, 2], [3, 4])


@pytest.mark.parametrize(
    ("addr", "length", "location"), [(-1, 512, "cpu:0"), (1 << 63, 1 << 63, "cpu:0"), (0, 0, "cpu:0"), (0, 512, "cpu")]
)
def test_regions_that_cannot_be(pair: Pair, addr: int, length: int, location: str) -> None:
    """No engine is given such numbers; the others are served as before."""
    told = msgspec.msgpack.decode(pair.decode.worker.transport.describe(), type=Description)
    region = msgspec.structs.replace(told.regions[0], addr=addr, length=length, location=location)
    false = msgspec.structs.replace(told, instance=NOBODY, regions=[region])
    register = wire.Register("127.0.0.1", 9, NOBODY, (0,), 0, 1, 512, msgspec.msgpack.encode(false))
    say(pair.prefill, [register.frames()])
    pair.run(2, 2, [1, 2], [3, 4])
    assert pair.prefill.worker._peers.why_refused(NOBODY)


def test_a_crowd_that_does_not_say_who_it_is(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections to the transfer port without a greeting give way to a sender."""
    monkeypatch.setattr(tcp_receiver, "_MOST_CONNECTIONS", 4)
    told = msgspec.msgpack.decode(pair.decode.worker.transport.describe(), type=Description)
    crowd = [socket.create_connection((told.host, told.port), timeout=5) for _ in range(8)]
    pair.run(1, 1, [1, 2], [3, 4])
    crowd += [socket.create_connection((told.host, told.port), timeout=5) for _ in range(8)]
    pair.run(2, 2, [5, 6], [7, 8])
    for connection in crowd:
        connection.close()


@pytest.mark.parametrize(
    "wrong", [{"token": 1 << 31}, {"token": -2}, {"finish_code": 9}, {"matched": 1 << 40}, {"cached_tokens": 1 << 40}]
)
def test_a_first_token_that_cannot_be(wrong: dict[str, int]) -> None:
    first = msgspec.to_builtins(FirstToken(3)) | wrong
    record = msgspec.msgpack.encode({"first": first, "num_pages": 1, "num_bytes": 512, "checksums": []})
    with pytest.raises(wire.FrameError, match="malformed"):
        wire.decode_for_decode([*wire.Aux(7, 0, 9, NOBODY, wire.AuxRecord(FirstToken(3), 1, 512)).frames()[:5], record])


def test_the_fault_of_one_message(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands behind it in the inbox is read without another message coming."""
    worker = pair.prefill.worker
    take, faults = worker.on_message, []

    def fail_at_some(frames: list[bytes]) -> None:
        if frames == wire.Alive(NOBODY).frames():
            raise RuntimeError("a fault")
        take(frames)

    monkeypatch.setattr(worker, "on_message", fail_at_some)
    worker.loop.call_soon_threadsafe(worker.loop.set_exception_handler, lambda loop, context: faults.append(context))
    say(pair.prefill, [wire.Alive(NOBODY).frames(), *[[b"ABORT"]] * 40, wire.Alive(NOBODY).frames(), [b"ABORT"]])
    until = time.monotonic() + 10.0
    while worker.counts["malformed"] < 41:
        assert time.monotonic() < until, worker.counts
        time.sleep(0.005)
    assert len(faults) == 2
    pair.run(1, 1, [1], [2])
