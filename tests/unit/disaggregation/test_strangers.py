"""Whoever reaches the ports of a worker: no message ends it, takes its memory or writes where nobody is expected."""

from __future__ import annotations

import asyncio
import random
import resource
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from sglang_lite.disaggregation import frames as wire
from sglang_lite.disaggregation.base import MAX_ROOM, FirstToken, KVFailed, PeerReady
from sglang_lite.disaggregation.states import State
from sglang_lite.transfer import tcp_receiver
from sglang_lite.transfer.base import Description
from sglang_lite.transfer.tcp_wire import GREETING_BYTES, HEADER, MAGIC, Header, table
from tests.support.session_pair import PAGE_BYTES, PAGE_SIZE, Pair, Side, say

ADDRESSES = ("127.0.0.1", "", "\0", "300.1.1.1", "a b", "::1", "[::1]", "*", "x" * 300, "é", "127.0.0.1:1;127.0.0.2")
NAMES = ("", "x", "\0", "é" * 100, "0" * 32)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def messages(chance: random.Random) -> list[list[bytes]]:
    """One of each kind with fields that somebody made up."""
    ip, name, group = chance.choice(ADDRESSES), chance.choice(NAMES), chance.choice(NAMES)
    room, port = chance.choice((0, 1, 7, MAX_ROOM)), chance.choice((1, 9, 65535))
    number = chance.choice((0, 1, 2, 1 << 40, (1 << 64) - 1))
    pages = np.array(chance.choice(([], [0], [5, 5], [2**31 - 1])), dtype=np.int32)
    record = wire.AuxRecord(FirstToken(chance.choice((0, -5, 1 << 40))), number, 7, [1, 2])
    register = (number % 9, chance.choice((0, 1, 2)), chance.choice((0, PAGE_BYTES, 1 << 60)))
    return [
        wire.Register(ip, port, name, (number,), *register, chance.randbytes(9)).frames(),
        wire.Request(room, ip, port, name, pages, 1 + number % 4096, number, number, group).frames(),
        wire.Status(room, chance.choice(list(State)), number % 3, number, name, "closed", "why").frames(),
        wire.Abort(room, ip, port, number, name, "m" * 5000, name, group).frames(),
        wire.AbortAck(room, number % 3, number, name).frames(),
        wire.Aux(room, number % 3, number, name, record).frames(),
        wire.AuxAck(room, number, name, "no").frames(),
        wire.Alive(name).frames(),
        [chance.randbytes(chance.randrange(40)) for _ in range(chance.randrange(1, 15))],
    ]


def damaged(chance: random.Random, frames: list[bytes]) -> list[bytes]:
    match chance.randrange(4):
        case 0:
            return frames[: chance.randrange(1, len(frames) + 1)]
        case 1:
            at = chance.randrange(len(frames))
            return [*frames[:at], chance.randbytes(chance.randrange(12)), *frames[at + 1 :]]
        case 2:
            return frames * 2
        case _:
            return frames


def watch_faults(side: Side) -> list[dict[str, Any]]:
    """What a handler on the worker's loop did not catch."""
    faults: list[dict[str, Any]] = []
    loop: asyncio.AbstractEventLoop = side.worker.loop
    loop.call_soon_threadsafe(loop.set_exception_handler, lambda loop, context: faults.append(context))
    return faults


def test_messages_that_somebody_made_up(pair: Pair) -> None:
    """Before, between and after those of sessions, which go on."""
    faults = [*map(watch_faults, (pair.prefill, pair.decode))]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chance = random.Random(5)
    for round_number in range(1, 6):
        invented = [damaged(chance, frames) for _ in range(60) for frames in messages(chance)]
        for side in (pair.prefill, pair.decode):
            say(side, invented)
        pair.run(round_number, 1000 + round_number, [1, 2, 3], [4, 5, 6])
    assert faults == [[], []]
    pair.prefill.wait_idle()
    pair.decode.wait_idle()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_stranger_does_not_end_a_session_by_its_number(pair: Pair) -> None:
    """Generations are small numbers, which anybody can guess; rooms are not."""
    pair.open_prefill(1, 77, 2 * PAGE_SIZE)
    pair.open_decode(1, 77, [1, 2], 2 * PAGE_SIZE)
    pair.prefill.wait(1, (PeerReady,))
    made_up = [wire.AbortAck(5, 0, number, "x" * 32).frames() for number in range(20)]
    made_up += [wire.Status(5, State.FAILED, 0, number, "x" * 32).frames() for number in range(20)]
    say(pair.decode, made_up)
    pair.prefill.worker.send(1, 0, np.array([3, 4], dtype=np.int32), FirstToken(9))
    assert pair.decode.wait(1).first == FirstToken(9)


def test_more_pages_than_a_prompt_can_have_are_not_kept(pair: Pair) -> None:
    pair.run(1, 1, [1], [1])  # the decode side is known from here on
    worker = pair.decode.worker
    many = np.zeros(65, dtype=np.int32)
    who = ("127.0.0.1", worker.port, worker.instance)
    say(pair.prefill, [wire.Request(5, *who, many, 1, 0, 1 << 40).frames()])
    pair.run(2, 2, [1], [1])  # behind it
    early = pair.prefill.worker._waiting._early
    assert early.get(5) is None


def test_a_refusal_of_the_prefill_side_reaches_who_waits(pair: Pair) -> None:
    """Before the request of the decode side, and behind it."""
    pair.prefill.worker.refuse("r", pair.params(8), "the queue is full")
    pair.open_decode(8, 8, [1], PAGE_SIZE)
    failed = pair.decode.wait(8, seconds=2.0)
    assert isinstance(failed, KVFailed)
    assert "the queue is full" in failed.message
    pair.open_decode(9, 9, [1], PAGE_SIZE)
    pair.run(10, 10, [1], [2])  # the request for room 9 is there by then
    pair.prefill.worker.refuse("r", pair.params(9), "the queue is full")
    assert "the queue is full" in pair.decode.wait(9, seconds=2.0).message


def connect(pair: Pair) -> tuple[socket.socket, Description]:
    told = msgspec.msgpack.decode(pair.decode.worker.transport.describe(), type=Description)
    return socket.create_connection((told.host, told.port), timeout=5), told


def test_bytes_that_somebody_made_up(pair: Pair) -> None:
    """Spans outside the region, other generations, and connections that end anywhere write nothing."""
    chance = random.Random(6)
    before = pair.decode.pool.copy()
    length = pair.decode.pool.nbytes
    wrong = [(-1, 8), (length, 1), (length - 4, 8), (2**63 - 1, 2), (0, length + 1), (0, -5), (0, 0)]
    for generation_error in (0, 1, 2**40):
        for offset, count in [*wrong, (0, 16)]:
            if not generation_error and (offset, count) == (0, 16):
                continue
            sock, told = connect(pair)
            region = told.regions[0]
            header = Header(1, region.region_id, region.generation + generation_error, 1, 0)
            spans = table(np.array([offset], dtype=np.int64), np.array([count], dtype=np.int64))
            greeting = MAGIC + b"f" * 32 + told.instance.encode()
            data = greeting + header.encode() + spans + b"\xff" * 64
            sock.sendall(data[: chance.randrange(GREETING_BYTES, len(data) + 1)])
            sock.close()
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, MAGIC + b"\xff" * 64, b"\0" * 300):
        sock, told = connect(pair)
        sock.sendall(garbage)
        sock.close()
    sock, told = connect(pair)
    sock.sendall(MAGIC + b"f" * 32 + told.instance.encode() + HEADER.pack(1, 1, 1, 2**32 - 1, 2**32 - 1))
    assert sock.recv(1) == b""  # nothing of that size is waited for
    sock.close()
    assert (pair.decode.pool == before).all()
    pair.run(1, 1, [1, 2, 3], [4, 5, 6])


def test_a_greeting_in_drops_does_not_keep_its_place(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_receiver, "_GREETING_SECONDS", 0.3)
    sock, told = connect(pair)
    sock.settimeout(0.1)
    ended = False
    for at in range(GREETING_BYTES):
        try:
            sock.send((MAGIC + b"f" * 32 + told.instance.encode())[at : at + 1])
            ended = sock.recv(1) == b""
        except TimeoutError:
            continue
        except OSError:
            ended = True
        if ended:
            break
    assert ended
    sock.close()
