"""The mooncake transport between two engines of one process, and the factory."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from sglang_lite.transfer.base import Description, Outcome, Peer, SpanBatch, Transfer, TransferError
from sglang_lite.transfer.factory import check_available
from sglang_lite.transfer.mooncake import MooncakeTransport, protocol_of
from sglang_lite.transfer.mooncake_peer import Session
from sglang_lite.transfer.tcp_peer import TcpTransfer

PAGE = 4096


def settled(transfer: Transfer, seconds: float = 20.0) -> Outcome:
    until = time.monotonic() + seconds
    while transfer.poll() is Outcome.PENDING or not transfer.quiesced:
        assert time.monotonic() < until, "it did not settle"
        time.sleep(0.001)
    return transfer.poll()


def batch(src: list[int], dst: list[int], length: int) -> SpanBatch:
    return SpanBatch(np.array(src), np.array(dst), np.full(len(src), length))


class Pair:
    def __init__(self) -> None:
        self.here, self.there = (MooncakeTransport("127.0.0.1") for _ in range(2))
        self.source = np.random.default_rng(1).integers(0, 256, 2048 * PAGE, dtype=np.uint8)
        self.target = np.zeros_like(self.source)
        self.src = self.here.register(self.source.ctypes.data, self.source.nbytes)
        self.dst = self.there.register(self.target.ctypes.data, self.target.nbytes)
        self.peer = self.here.connect(self.there.describe())

    def submit(self, spans: SpanBatch, notify: bytes = b"") -> Transfer:
        return self.here.submit(self.peer, self.src, self.peer.regions[0], spans, notify=notify, deadline_s=20.0)


@pytest.fixture(scope="module")
def shared() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.here.close(5.0)
    pair.there.close(5.0)


@pytest.fixture
def pair(shared: Pair) -> Pair:
    shared.target[:] = 0
    return shared


def test_scattered_pages_arrive_and_then_their_notification(pair: Pair) -> None:
    order = np.random.default_rng(2).permutation(2048)
    spans = batch([page * PAGE for page in range(2048)], (order * PAGE).tolist(), PAGE)
    assert settled(pair.submit(spans, b"all")) is Outcome.DONE
    assert (pair.target.reshape(-1, PAGE)[order] == pair.source.reshape(-1, PAGE)).all()
    assert pair.there.notifications() == [(pair.here.instance, b"all")]
    assert pair.there.notifications() == []


def test_an_abort_is_quiet_only_later_and_says_nothing_to_the_peer(pair: Pair) -> None:
    transfer = pair.submit(batch([0], [0], 2048 * PAGE), b"never")
    transfer.abort()
    assert transfer.poll() is Outcome.FAILED and transfer.reason == "aborted"
    settled(transfer)
    pair.target[:] = 0
    assert settled(pair.submit(batch([0], [0], PAGE), b"next")) is Outcome.DONE
    assert not pair.target[PAGE:].any(), "nothing lands behind quiesced"
    assert pair.there.notifications() == [(pair.here.instance, b"next")]


def test_what_lies_outside_is_refused_before_the_engine_sees_it(pair: Pair) -> None:
    for src, dst in ((2048 * PAGE, 0), (0, 2048 * PAGE), (-1, 0)):
        with pytest.raises(TransferError) as caught:
            pair.submit(batch([src], [dst], PAGE))
        assert caught.value.reason == "rejected"
    with pytest.raises(TransferError, match="overlaps"):
        pair.here.register(pair.source.ctypes.data, PAGE)


def test_a_region_that_was_closed_refuses_and_its_successor_takes(pair: Pair) -> None:
    pair.dst.close()
    transfer = pair.submit(batch([0], [0], PAGE), b"n")
    assert settled(transfer) is Outcome.FAILED and transfer.reason == "rejected"
    assert not pair.target.any()
    pair.dst = pair.there.register(pair.target.ctypes.data, pair.target.nbytes)
    pair.peer = pair.here.connect(pair.there.describe())
    assert settled(pair.submit(batch([0], [0], PAGE))) is Outcome.DONE
    assert pair.there.notifications() == []


def test_a_notification_that_cannot_be_sent_fails_its_transfer_and_no_other(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    (peer,) = [known for known in pair.here._peers.values() if known.instance == pair.peer.instance]

    def refuse(control: Peer, note: bytes) -> TcpTransfer:
        raise TransferError("closed", "no channel")

    monkeypatch.setattr(peer, "_send_note", refuse)
    transfer = pair.submit(batch([0], [0], PAGE), b"lost")
    assert settled(transfer) is Outcome.FAILED and transfer.reason == "closed"
    monkeypatch.undo()
    assert settled(pair.submit(batch([0], [0], PAGE), b"next")) is Outcome.DONE
    assert pair.there.notifications() == [(pair.here.instance, b"next")]


def test_a_peer_without_a_control_region_is_refused_and_leaves_nothing(pair: Pair) -> None:
    told = msgspec.msgpack.decode(pair.there.describe(), type=Description)
    session = msgspec.msgpack.decode(told.session, type=Session)
    control = msgspec.structs.replace(
        msgspec.msgpack.decode(session.control, type=Description), instance="0" * 32, regions=[]
    )
    bare = Session(session.session, msgspec.msgpack.encode(control))
    told = msgspec.structs.replace(told, instance="0" * 32, session=msgspec.msgpack.encode(bare))
    with pytest.raises(TransferError, match="no region for notifications"):
        pair.here.connect(msgspec.msgpack.encode(told))
    assert "0" * 32 not in pair.here.control._peers


def test_a_peer_that_is_forgotten_is_forgotten_by_the_control_channel_too(pair: Pair) -> None:
    waiting = pair.submit(batch([0], [0], 2048 * PAGE), b"never")
    pair.here.disconnect(pair.peer)
    assert not pair.here.control._peers
    assert settled(waiting) is Outcome.FAILED and waiting.reason == "peer_lost"
    with pytest.raises(TransferError, match="does not know the peer"):
        pair.submit(batch([0], [0], PAGE))
    pair.peer = pair.here.connect(pair.there.describe())
    assert settled(pair.submit(batch([0], [0], PAGE), b"again")) is Outcome.DONE
    assert pair.there.notifications() == [(pair.here.instance, b"again")]


def test_the_protocol_is_that_of_the_topology(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    assert pair.here.capabilities().protocol == protocol_of(pair.here.engine.get_local_topology())
    assert protocol_of('{"cpu:0": [[], []]}') == "tcp"
    assert protocol_of('{"cpu:0": [[], []], "cpu:1": [[], ["mlx5_0"]]}') == "rdma"
    with pytest.raises(TransferError, match="topology"):
        protocol_of("[]")
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert protocol_of('{"cpu:0": [["mlx5_0"], []]}') == "tcp"


def test_strange_descriptions_are_refused(pair: Pair) -> None:
    for text in (b"", b"junk", pair.there.describe().replace(b"mooncake", b"mooncoke")):
        with pytest.raises(TransferError):
            pair.here.connect(text)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        raise ImportError("libibverbs.so.1: cannot open")

    with pytest.raises(TransferError, match="no transport 'fake'"):
        check_available("fake")
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransferError, match=r"sglang-lite\[mooncake\]"):
        check_available("mooncake")
    monkeypatch.setattr("sglang_lite.transfer.factory.importlib.import_module", load)
    with pytest.raises(TransferError, match="apt-get install libibverbs1 libnuma1 libcurl4"):
        check_available("mooncake")


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


OVER_IPV6 = """
import os, time, numpy as np
from sglang_lite.transfer.base import Outcome, SpanBatch
from sglang_lite.transfer.factory import open_transport

here, there = (open_transport("mooncake_tcp", host="::1") for _ in range(2))
source, target = np.arange(4096, dtype=np.uint8), np.zeros(4096, dtype=np.uint8)
lease = here.register(source.ctypes.data, 4096)
there.register(target.ctypes.data, 4096)
peer = here.connect(there.describe())
spans = SpanBatch(np.array([0]), np.array([0]), np.array([4096]))
transfer = here.submit(peer, lease, peer.regions[0], spans, notify=b"", deadline_s=20.0)
while transfer.poll() is Outcome.PENDING:
    time.sleep(0.001)
print(transfer.poll().name, transfer.detail, (source == target).all())
"""


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
def test_addresses_of_ipv6() -> None:
    """In a process of its own: the engine decides for one kind of address when it is loaded."""
    done = subprocess.run([sys.executable, "-c", OVER_IPV6], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["DONE", "True"], done
