"""Every transport between two processes: bytes, outcomes, and when nothing of a transfer can move any more."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from sglang_lite.transfer.base import HOST, KVTransport, Outcome, RegionBusy, SpanBatch, Transfer, TransferError
from sglang_lite.transfer.factory import open_transport
from tests.support.transfer_peer import PeerProcess, digest

PAGE = 4096
COUNT = 16384
SIZE = PAGE * COUNT


class Here:
    """The side that sends, and the receiving processes that come and go."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.transport: KVTransport = open_transport(name, host="127.0.0.1")
        self.memory = np.random.default_rng(1).integers(1, 256, SIZE, dtype=np.uint8)
        self.lease = self.transport.register(self.memory.ctypes.data, SIZE)
        self.there = PeerProcess(name, SIZE)
        self.peer = self.transport.connect(self.there.describe())

    def restart(self) -> None:
        """Another process in the place of the one that is there."""
        self.there.kill()
        self.transport.disconnect(self.peer)
        self.there = PeerProcess(self.name, SIZE)
        self.peer = self.transport.connect(self.there.describe())

    def submit(self, spans: SpanBatch, notify: bytes = b"", deadline_s: float = 20.0) -> Transfer:
        return self.transport.submit(
            self.peer, self.lease, self.peer.regions[0], spans, notify=notify, deadline_s=deadline_s
        )

    def close(self) -> None:
        self.there.kill()
        self.transport.close(5.0)


@pytest.fixture(scope="module", params=["tcp", "mooncake", "nixl"])
def shared(request: pytest.FixtureRequest) -> Iterator[Here]:
    with contextlib.closing(Here(request.param)) as here:
        yield here


@pytest.fixture
def here(shared: Here) -> Here:
    if shared.there.process.poll() is not None:
        shared.restart()
    shared.there.ask("zero")
    return shared


def pages(source: npt.ArrayLike, target: npt.ArrayLike, length: int = PAGE) -> SpanBatch:
    """One span a page."""
    return SpanBatch(
        np.asarray(source) * PAGE, np.asarray(target, dtype=np.int64) * PAGE, np.full(np.size(source), length)
    )


def whole() -> SpanBatch:
    return SpanBatch(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, SIZE))


def settled(transfer: Transfer, seconds: float = 20.0) -> Outcome:
    until = time.monotonic() + seconds
    while transfer.poll() is Outcome.PENDING or not transfer.quiesced:
        assert time.monotonic() < until, f"{transfer.poll()}, quiesced {transfer.quiesced}"
        time.sleep(0.001)
    return transfer.poll()


def expected(here: Here, spans: SpanBatch) -> int:
    target = np.zeros(SIZE, dtype=np.uint8)
    for source, to, length in zip(spans.src_offset, spans.dst_offset, spans.length, strict=True):
        target[to : to + length] = here.memory[source : source + length]
    return digest(target)


def test_ten_thousand_scattered_pages_arrive_before_their_notification(here: Here) -> None:
    generator = np.random.default_rng(2)
    spans = pages(generator.permutation(COUNT)[:10_000], generator.permutation(COUNT)[:10_000])
    assert len(spans) == 10_000
    transfer = here.submit(spans, b"all of it")
    assert transfer.num_bytes == 10_000 * PAGE
    wanted = expected(here, spans)
    assert here.there.ask("notes", 1) == [[here.transport.instance, "all of it", wanted]]
    assert settled(transfer) is Outcome.DONE and transfer.reason is None


def test_odd_lengths_and_offsets_leave_their_neighbours_alone(here: Here) -> None:
    generator = np.random.default_rng(3)
    length = generator.integers(1, PAGE, 64)
    spans = SpanBatch(
        generator.integers(0, SIZE - PAGE, 64), generator.permutation(COUNT)[:64] * PAGE, length.astype(np.int64)
    )
    assert settled(here.submit(spans)) is Outcome.DONE
    assert here.there.ask("bytes") == expected(here, spans)


def test_notifications_come_once_and_as_many_as_were_sent(here: Here) -> None:
    for number in range(8):
        assert settled(here.submit(pages(np.arange(4), np.arange(4)), b"note %d" % number)) is Outcome.DONE
    notes = here.there.ask("notes", 8)
    assert [(sender, text) for sender, text, _ in notes] == [(here.transport.instance, f"note {n}") for n in range(8)]


def test_what_is_outside_or_stale_is_refused(here: Here) -> None:
    for source, target in ((COUNT, 0), (0, COUNT), (-1, 0), (0, -1)):
        with pytest.raises(TransferError, match="outside"):
            here.submit(pages(np.array([source]), [target]))
    old = here.peer.regions[0]
    here.there.ask("reregister")
    here.peer = here.transport.connect(here.there.describe())
    assert here.peer.regions[0].generation > old.generation
    with pytest.raises(TransferError, match=f"no region {old.region_id} of generation {old.generation}"):
        here.transport.submit(here.peer, here.lease, old, whole(), notify=b"", deadline_s=5.0)
    spans = pages(np.arange(5), np.arange(5))
    assert settled(here.submit(spans)) is Outcome.DONE
    assert here.there.ask("bytes") == expected(here, spans)
    with pytest.raises(TransferError, match="overlaps"):
        here.transport.register(here.memory.ctypes.data + PAGE, PAGE, HOST)


def test_a_stopped_peer_is_late_and_its_bytes_land_or_not_before_quiet(here: Here) -> None:
    assert settled(here.submit(pages(np.arange(1), np.arange(1)))) is Outcome.DONE
    here.there.stop()
    transfer = here.submit(whole(), b"never", deadline_s=0.3)
    seconds, until = [], time.monotonic() + 10.0
    while True:
        start = time.perf_counter()
        outcome = transfer.poll()
        seconds.append(time.perf_counter() - start)
        if outcome is not Outcome.PENDING:
            break
        assert time.monotonic() < until
        time.sleep(0.002)
    assert outcome is Outcome.FAILED and transfer.reason == "deadline"
    # Not the slowest: another process may have had the core.
    assert len(seconds) > 20 and np.quantile(seconds, 0.9) < 0.001
    assert not transfer.quiesced, "the peer may still write what was sent"
    with pytest.raises(RegionBusy):
        here.lease.close()
    here.there.resume()
    assert settled(transfer) is Outcome.FAILED and transfer.reason == "deadline"
    here.there.ask("zero")
    spans = pages(np.arange(1), np.arange(1))
    assert settled(here.submit(spans, b"next")) is Outcome.DONE
    notes = here.there.ask("notes", 1)
    assert notes[-1] == [here.transport.instance, "next", expected(here, spans)], "nothing lands behind quiesced"


def test_an_abort_is_told_at_once_and_quiet_when_the_bytes_are(here: Here) -> None:
    transfer = here.submit(whole(), b"never")
    transfer.abort()
    assert transfer.poll() in (Outcome.FAILED, Outcome.DONE)
    settled(transfer)
    here.there.ask("zero")
    spans = pages(np.arange(2), np.arange(2))
    assert settled(here.submit(spans)) is Outcome.DONE
    assert here.there.ask("bytes") == expected(here, spans)


def test_a_killed_peer_is_lost_and_its_successor_is_another(here: Here) -> None:
    assert settled(here.submit(pages(np.arange(1), np.arange(1)))) is Outcome.DONE
    here.there.stop()
    transfers = [here.submit(whole(), b"never") for _ in range(3)]
    assert all(transfer.poll() is Outcome.PENDING for transfer in transfers)
    here.there.kill()
    assert [settled(transfer, 8.0) for transfer in transfers] == [Outcome.FAILED] * 3
    assert {transfer.reason for transfer in transfers} == {"peer_lost"}
    gone = here.peer
    here.restart()
    assert here.peer.instance != gone.instance
    with pytest.raises(TransferError, match="does not know the peer"):
        here.transport.submit(gone, here.lease, gone.regions[0], whole(), notify=b"", deadline_s=5.0)
    spans = pages(np.arange(3), np.arange(3))
    assert settled(here.submit(spans, b"hello")) is Outcome.DONE
    assert here.there.ask("notes", 1) == [[here.transport.instance, "hello", expected(here, spans)]]


def test_descriptions_that_are_none_are_refused(here: Here) -> None:
    for text in (b"", b"junk", here.there.describe()[:-9]):
        with pytest.raises(TransferError):
            here.transport.connect(text)
