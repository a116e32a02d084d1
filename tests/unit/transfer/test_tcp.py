"""The tcp transport between two transports of one process; between processes: tests/pd."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.transfer.base import Outcome, RegionBusy, SpanBatch, Transfer, TransferError
from sglang_lite.transfer.tcp import TcpTransport

PAGE = 4096


def spans(*rows: tuple[int, int, int]) -> SpanBatch:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return SpanBatch(columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy())


def wait(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.001)


def settled(transfer: Transfer) -> Outcome:
    wait(lambda: transfer.poll() is not Outcome.PENDING and transfer.quiesced)
    return transfer.poll()


class Pair:
    """Two transports with a pool each; the first writes into the second."""

    def __init__(self, num_bytes: int = 64 * PAGE) -> None:
        self.here, self.there = TcpTransport("127.0.0.1"), TcpTransport("127.0.0.1")
        self.source = np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)
        self.target = np.zeros(num_bytes, dtype=np.uint8)
        self.src = self.here.register(self.source.ctypes.data, num_bytes)
        self.dst = self.there.register(self.target.ctypes.data, num_bytes)
        self.peer = self.here.connect(self.there.describe())

    def submit(self, batch: SpanBatch, notify: bytes = b"", deadline_s: float = 10.0) -> Transfer:
        return self.here.submit(self.peer, self.src, self.peer.regions[0], batch, notify=notify, deadline_s=deadline_s)

    def fence(self) -> None:
        """Shut the first one out."""
        fence = self.there.fence(self.here.instance)
        assert fence is not None
        wait(lambda: fence.quiesced)

    def close(self) -> None:
        self.here.close(1.0)
        self.there.close(1.0)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_bytes_are_where_a_copy_would_put_them(data: st.DataObject) -> None:
    pair = Pair(256)
    try:
        for _ in range(data.draw(st.integers(1, 4))):
            rows = []
            for _ in range(data.draw(st.integers(0, 20))):
                length = data.draw(st.integers(1, 64))
                rows.append((data.draw(st.integers(0, 256 - length)), data.draw(st.integers(0, 256 - length)), length))
            expected = pair.target.copy()
            for src, dst, length in rows:
                expected[dst : dst + length] = pair.source[src : src + length]
            assert settled(pair.submit(spans(*rows), b"n")) is Outcome.DONE
            assert (pair.target == expected).all()
            assert pair.there.notifications() == [(pair.here.instance, b"n")]
    finally:
        pair.close()


def test_notifications_come_once_in_order_behind_their_bytes(pair: Pair) -> None:
    transfers = [pair.submit(spans((page * PAGE, page * PAGE, PAGE)), bytes([page])) for page in range(64)]
    seen: list[bytes] = []
    while len(seen) < 64:
        for sender, note in pair.there.notifications():
            assert sender == pair.here.instance
            page = note[0]
            assert (pair.target[page * PAGE :][:PAGE] == pair.source[page * PAGE :][:PAGE]).all()
            seen.append(note)
    assert seen == [bytes([page]) for page in range(64)]
    assert [settled(transfer) for transfer in transfers] == [Outcome.DONE] * 64
    assert pair.there.notifications() == []


@pytest.mark.parametrize(
    "row",
    [(0, 64 * PAGE - 10, 11), (64 * PAGE, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 0), (2**62, 2**62, 2**62)],
    ids=str,
)
def test_spans_outside_are_refused_before_anything_is_sent(pair: Pair, row: tuple[int, int, int]) -> None:
    with pytest.raises(TransferError) as caught:
        pair.submit(spans((0, 0, 1), row))
    assert caught.value.reason == "rejected"
    assert not pair.target.any()


def test_the_receiver_refuses_a_region_that_was_closed_and_registered_again(pair: Pair) -> None:
    stale = pair.peer.regions[0]
    pair.dst.close()
    again = pair.there.register(pair.target.ctypes.data, len(pair.target))
    transfer = pair.submit(spans((0, 0, PAGE)), b"n")
    assert settled(transfer) is Outcome.FAILED and transfer.reason == "rejected"
    assert not pair.target.any() and pair.there.notifications() == []
    pair.peer = pair.here.connect(pair.there.describe())
    assert pair.peer.regions[0].generation == again.generation > stale.generation
    assert settled(pair.submit(spans((0, 0, PAGE)))) is Outcome.DONE


def test_a_sender_that_is_fenced_off_writes_nothing_until_it_is_told_of_the_region_again(pair: Pair) -> None:
    """Transfers under way end, those with what it knew are refused, and no other sender notices."""
    other = TcpTransport("127.0.0.1")
    try:
        src, peer = other.register(pair.source.ctypes.data, len(pair.source)), other.connect(pair.there.describe())
        whole = spans((0, 0, len(pair.source)))
        while True:  # until a fence comes between the bytes of a transfer
            running = [pair.submit(whole) for _ in range(8)]
            pair.fence()
            pair.target[:] = 0
            late = pair.submit(whole)
            if Outcome.FAILED in [settled(transfer) for transfer in running]:
                break
            pair.peer = pair.here.connect(pair.there.describe(pair.here.instance))
        assert settled(late) is Outcome.FAILED
        assert not pair.target.any()
        pair.peer = pair.here.connect(pair.there.describe())
        assert settled(pair.submit(whole)) is Outcome.FAILED
        assert not pair.target.any()
        transfer = other.submit(peer, src, peer.regions[0], spans((0, 0, PAGE)), notify=b"", deadline_s=10.0)
        assert settled(transfer) is Outcome.DONE
        pair.peer = pair.here.connect(pair.there.describe(pair.here.instance))
        assert settled(pair.submit(whole)) is Outcome.DONE
        assert (pair.target == pair.source).all()
    finally:
        other.close(1.0)


def test_regions_are_registered_once_and_stay_while_they_are_used(pair: Pair) -> None:
    for addr, length in ((pair.src.addr, 10), (pair.src.addr - 5, 6), (pair.src.addr, 0)):
        with pytest.raises(TransferError):
            pair.here.register(addr, length)
    for location in ("metal:0", "xpu:0", "nowhere", "cuda:0"):
        with pytest.raises(TransferError, match=r"location|cannot reach"):
            pair.here.register(1 << 40, 10, location)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and says nothing
        pair.peer.description = type(pair.peer.description)(
            *[getattr(pair.peer.description, name) for name in ("engine", "version", "instance", "host")],
            silent.getsockname()[1],
            b"",
            pair.peer.regions,
        )
        transfer = pair.submit(spans((0, 0, PAGE)), deadline_s=0.2)
        with pytest.raises(RegionBusy):
            pair.src.close()
        wait(lambda: transfer.poll() is Outcome.FAILED)
        assert transfer.reason == "deadline"
    wait(lambda: transfer.quiesced)
    pair.src.close()
    pair.src.close()
    with pytest.raises(TransferError, match="not registered"):
        pair.submit(spans((0, 0, 1)))


def test_an_abort_stops_the_bytes_and_later_transfers_go_on() -> None:
    pair = Pair(256 << 20)
    try:
        half = 128 << 20
        first = pair.submit(spans((0, 0, half)), b"first")
        second = pair.submit(spans((half, half, PAGE)), b"second")
        first.abort()
        assert first.poll() is Outcome.FAILED and first.reason == "aborted"
        assert settled(second) is Outcome.DONE
        wait(lambda: first.quiesced)
        assert [note for _, note in pair.there.notifications()] == [b"second"]
        seen = pair.target[:half].copy()
        pair.target[:half] = 0
        wait(lambda: not pair.dst.lease.num_users)  # type: ignore[attr-defined]
        assert not pair.target[:half].any(), "nothing is written behind quiesced"
        assert (seen == pair.source[:half]).mean() < 1.0
    finally:
        pair.close()


def test_a_replaced_peer_is_not_the_old_one(pair: Pair) -> None:
    """Another transport behind the same address gets none of the bytes that were for the first."""
    other = TcpTransport("127.0.0.1")
    described = pair.there.describe()
    assert settled(pair.submit(spans((0, 0, PAGE)))) is Outcome.DONE
    pair.peer.description = type(pair.peer.description)(
        *[getattr(pair.peer.description, name) for name in ("engine", "version", "instance", "host")],
        other._receiver.port,
        b"",
        pair.peer.regions,
    )
    pair.there.close(1.0)
    transfer = pair.submit(spans((0, 0, PAGE)))
    assert settled(transfer) is Outcome.FAILED and transfer.reason == "peer_lost"
    assert other.notifications() == [] and described
    other.close(1.0)


def test_a_closed_peer_is_lost_at_once(pair: Pair) -> None:
    assert settled(pair.submit(spans((0, 0, PAGE)))) is Outcome.DONE
    pair.there.close(1.0)
    transfer = pair.submit(spans((0, 0, PAGE)))
    started = time.monotonic()
    assert settled(transfer) is Outcome.FAILED and transfer.reason == "peer_lost"
    assert time.monotonic() - started < 2.0


def test_ten_thousand_spans_are_one_transfer(pair: Pair) -> None:
    rows = [(index * 26, (9_999 - index) * 26, 26) for index in range(10_000)]
    transfer = pair.submit(spans(*rows))
    assert settled(transfer) is Outcome.DONE
    assert transfer.num_bytes == 260_000
    assert (pair.target[:260_000].reshape(-1, 26)[::-1] == pair.source[:260_000].reshape(-1, 26)).all()


def test_descriptions_of_others_are_refused(pair: Pair) -> None:
    for text in (b"", b"junk", b"\x90", pair.there.describe().replace(b"tcp", b"udp")):
        with pytest.raises(TransferError):
            pair.here.connect(text)


def test_a_stranger_does_no_harm(pair: Pair) -> None:
    """Connections that say nothing, too little or nonsense leave the receiver as it was."""
    address = ("127.0.0.1", pair.there._receiver.port)
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"SGLT1\0\0\0" + b"x" * 64, b"\xff" * 500):
        with socket.create_connection(address) as sock:
            sock.sendall(words)
    assert settled(pair.submit(spans((0, 0, PAGE)))) is Outcome.DONE
    assert not pair.target[PAGE:].any()
