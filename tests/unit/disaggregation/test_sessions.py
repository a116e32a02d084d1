"""Prefill and decode workers over real sockets: success, aborts, failures, restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from sglang_lite.disaggregation.base import FAKE_HOST, FirstToken, KVArrived, KVFailed, KVQuiesced, KVSent, PeerReady
from sglang_lite.disaggregation.options import SessionOptions
from sglang_lite.disaggregation.prefill_sessions import PrefillWorker
from sglang_lite.disaggregation.worker import Place
from sglang_lite.transfer.base import Fence
from sglang_lite.transfer.tcp import TcpTransport
from sglang_lite.types import TransferParams
from tests.support.session_pair import FAST, Pair, make_pool

LAST = FirstToken(17, 3, 1, 17, -0.5, ((-0.5, 17), (-1.5, 4)), ((-2.0, 9),))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def _pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_pages_and_record_arrive(pair: Pair) -> None:
    pair.open_prefill(1, 77, 10)
    pair.open_decode(5, 77, [9, 3, 60], 10)
    assert pair.prefill.wait(1, (PeerReady,)) == PeerReady(1, 0)
    pair.prefill.worker.send(1, 0, _pages(40, 2, 11), LAST)
    assert pair.decode.wait(5) == KVArrived(5, LAST)
    assert pair.prefill.wait(1) == KVSent(1)
    assert (pair.decode.pool[[9, 3, 60]] == pair.prefill.pool[[40, 2, 11]]).all()
    untouched = np.delete(pair.decode.pool, [9, 3, 60], axis=0)
    assert not untouched.any()
    sent, got = pair.prefill.worker.stats(), pair.decode.worker.stats()
    assert (sent.spans, sent.bytes, sent.transfers, sent.completed) == (3, 3 * 512, 1, 1)
    assert (got.spans, got.bytes, got.transfers) == (3, 3 * 512, 1)
    assert len(sent.completed_checksums[0]) == 64
    assert not sent.by_state and not got.by_state and not sent.failures and not got.failures


def test_chunks_are_sent_while_the_prompt_is_computed(pair: Pair) -> None:
    pair.open_decode(5, 78, [0, 1, 2, 3], 16)
    pair.open_prefill(1, 78, 16)
    pair.prefill.wait(1, (PeerReady,))
    pair.prefill.worker.send(1, 0, _pages(8, 9))
    until = time.monotonic() + 5
    while not (pair.decode.pool[[0, 1]] == pair.prefill.pool[[8, 9]]).all():
        assert time.monotonic() < until
    pair.prefill.worker.send(1, 2, _pages(4))
    pair.prefill.worker.send(1, 3, _pages(7), LAST)
    assert isinstance(pair.decode.wait(5), KVArrived)
    assert isinstance(pair.prefill.wait(1), KVSent)
    assert (pair.decode.pool[[0, 1, 2, 3]] == pair.prefill.pool[[8, 9, 4, 7]]).all()
    assert pair.prefill.worker.stats().completed == 3


def test_a_prefix_that_decode_has_is_not_sent(pair: Pair) -> None:
    pair.open_decode(5, 79, [20], 9, prefix=8)
    pair.open_prefill(1, 79, 9)
    assert pair.prefill.wait(1, (PeerReady,)) == PeerReady(1, 8)
    pair.prefill.worker.send(1, 0, _pages(1, 2))
    pair.prefill.worker.send(1, 2, _pages(3), LAST)
    assert isinstance(pair.decode.wait(5), KVArrived)
    assert (pair.decode.pool[20] == pair.prefill.pool[3]).all()
    assert pair.prefill.worker.stats().spans == 1


def test_many_sessions_at_once_and_rooms_used_again(pair: Pair) -> None:
    for turn in range(2):
        for number in range(30):
            pair.open_prefill(100 * turn + number, number, 8)
            pair.open_decode(100 * turn + number, number, [2 * number, 2 * number + 1], 8)
        for number in range(30):
            key = 100 * turn + number
            pair.prefill.wait(key, (PeerReady,))
            pair.prefill.worker.send(key, 0, _pages(2 * number + 1, 2 * number), FirstToken(number))
        for number in range(30):
            key = 100 * turn + number
            assert pair.decode.wait(key) == KVArrived(key, FirstToken(number))
            assert pair.prefill.wait(key) == KVSent(key)
    assert pair.prefill.worker.stats().transfers == 60


def test_the_fake_host_needs_no_peer(pair: Pair) -> None:
    params = TransferParams(FAKE_HOST, 1, 3)
    pair.prefill.worker.open(1, "warm-up", params, 4)
    pair.prefill.wait(1, (PeerReady,))
    pair.prefill.worker.send(1, 0, _pages(1), FirstToken(5))
    assert pair.prefill.wait(1) == KVSent(1)
    pair.decode.worker.open(2, "warm-up", params, _pages(1), 4, 0)
    assert isinstance(pair.decode.wait(2), KVArrived)


def test_a_room_in_use_is_refused_and_the_first_is_untouched(pair: Pair) -> None:
    pair.open_prefill(1, 5, 4)
    pair.open_prefill(2, 5, 4)
    failed = pair.prefill.wait(2)
    assert isinstance(failed, KVFailed) and failed.status == 400 and failed.quiesced and "room 5" in failed.message
    pair.open_decode(1, 5, [7], 4)
    pair.open_decode(2, 5, [8], 4)
    assert pair.decode.wait(2).status == 400
    pair.prefill.wait(1, (PeerReady,))
    pair.prefill.worker.send(1, 0, _pages(3), LAST)
    assert isinstance(pair.decode.wait(1), KVArrived)
    assert isinstance(pair.prefill.wait(1), KVSent)


def test_damaged_bytes_fail_both_sides(pair: Pair) -> None:
    pair.open_prefill(1, 5, 8)
    pair.open_decode(1, 5, [7, 8], 8)
    pair.prefill.wait(1, (PeerReady,))
    pair.prefill.worker.send(1, 0, _pages(3))
    until = time.monotonic() + 5
    while not pair.decode.pool[7].any():
        assert time.monotonic() < until
    pair.decode.pool[7, 100] ^= 1
    pair.prefill.worker.send(1, 1, _pages(4), LAST)
    failed = pair.decode.wait(1)
    assert isinstance(failed, KVFailed) and failed.reason == "corrupt" and failed.quiesced
    assert "checksum mismatch: 1 of 2 pages" in failed.message
    answer = pair.prefill.wait(1)
    assert isinstance(answer, KVFailed) and "checksum mismatch" in answer.message and answer.quiesced
    pair.run(2, 5, [1], [2])


STAGES = ("before the peer", "ready", "first pages sent")


def _bring_to(pair: Pair, stage: str, first: str) -> None:
    if stage == "before the peer":
        pair.open_prefill(1, 5, 8) if first == "prefill" else pair.open_decode(1, 5, [7, 8], 8)
        return
    pair.open_prefill(1, 5, 8)
    pair.open_decode(1, 5, [7, 8], 8)
    pair.prefill.wait(1, (PeerReady,))
    if stage == "first pages sent":
        pair.prefill.worker.send(1, 0, _pages(3))


@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_of_decode_reaches_prefill_within_a_second(pair: Pair, stage: str) -> None:
    _bring_to(pair, stage, "decode")
    pair.decode.worker.abort(1)
    began = time.monotonic()
    if stage == "before the peer":
        pair.open_prefill(1, 5, 8)
    assert pair.decode.wait(1) == KVQuiesced(1)
    failed = pair.prefill.wait(1)
    assert isinstance(failed, KVFailed) and failed.status == 500 and "gave the request up" in failed.message
    if not failed.quiesced:
        assert pair.prefill.wait(1) == KVQuiesced(1)
    assert time.monotonic() - began < 1.5
    pair.run(2, 5, [1, 2], [3, 4])
    pair.prefill.wait_idle()
    pair.decode.wait_idle()


@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_of_prefill_reaches_decode_within_a_second(pair: Pair, stage: str) -> None:
    _bring_to(pair, stage, "prefill")
    pair.prefill.worker.abort(1)
    began = time.monotonic()
    if stage == "before the peer":
        pair.open_decode(1, 5, [7, 8], 8)
    assert pair.prefill.wait(1) == KVQuiesced(1)
    failed = pair.decode.wait(1)
    assert isinstance(failed, KVFailed) and failed.status == 500 and "gave the request up" in failed.message
    assert time.monotonic() - began < 1.5
    assert failed.quiesced or pair.decode.wait(1) == KVQuiesced(1)
    pair.run(2, 5, [1, 2], [3, 4])
    pair.prefill.wait_idle()
    pair.decode.wait_idle()


def test_aborts_of_what_is_over_are_answered(pair: Pair) -> None:
    pair.run(1, 5, [1], [2])
    pair.prefill.worker.abort(1)
    pair.decode.worker.abort(1)
    assert pair.prefill.wait(1) == KVQuiesced(1)
    assert pair.decode.wait(1) == KVQuiesced(1)


def test_a_request_that_decode_refuses_ends_at_once_on_the_prefill_side(pair: Pair) -> None:
    pair.open_prefill(1, 5, 8)
    pair.decode.worker.refuse("request-5", pair.params(5), "the queue is full")
    failed = pair.prefill.wait(1, seconds=2.0)
    assert isinstance(failed, KVFailed) and "the queue is full" in failed.message and failed.quiesced
    pair.run(2, 5, [1, 2], [3, 4])


def test_a_prompt_that_does_not_fit_the_offered_pages(pair: Pair) -> None:
    pair.open_prefill(1, 5, 12)
    pair.open_decode(1, 5, [7, 8], 8)
    assert "gives 2 pages where 12 tokens need 3" in pair.prefill.wait(1).message
    assert "gives 2 pages where 12 tokens need 3" in pair.decode.wait(1).message
    assert pair.decode.wait(1) == KVQuiesced(1)


def _timeouts(**times: float) -> SessionOptions:
    base = {name: getattr(FAST, name) for name in SessionOptions.__dataclass_fields__}
    return SessionOptions(**(base | times))


def test_metadata_that_never_comes() -> None:
    pair = Pair(_timeouts(bootstrap_timeout=0.3, metadata_wait=0.1))
    try:
        pair.open_prefill(1, 5, 4)
        failed = pair.prefill.wait(1, seconds=2.0)
        assert failed.reason == "timeout" and "no decode server sent its pages" in failed.message and failed.quiesced
        pair.open_decode(2, 6, [3], 4)
        failed = pair.decode.wait(2, seconds=3.0)
        assert "never got a request with this room" in failed.message
        assert pair.decode.wait(2) == KVQuiesced(2)
    finally:
        pair.close()


def test_pages_that_never_come() -> None:
    pair = Pair(_timeouts(waiting_timeout=0.4))
    try:
        pair.open_prefill(1, 5, 4)
        pair.open_decode(1, 5, [3], 4)
        assert pair.decode.wait(1, seconds=2.0).reason == "timeout"
        assert pair.decode.wait(1) == KVQuiesced(1)
        assert "no KV after" in pair.prefill.wait(1).message
    finally:
        pair.close()


def test_a_prefill_worker_that_goes_away_and_comes_back(pair: Pair) -> None:
    pair.run(1, 5, [1], [2])
    pair.open_decode(2, 6, [3], 4)
    pair.open_prefill(2, 6, 4)
    pair.prefill.wait(2, (PeerReady,))
    port = pair.prefill.worker.port
    pair.prefill.worker.close(0.1)
    failed = pair.decode.wait(2)
    assert isinstance(failed, KVFailed) and failed.status == 500
    assert failed.quiesced or pair.decode.wait(2) == KVQuiesced(2)
    pair.prefill = pair.new_prefill(Place("127.0.0.1", (port, port)))
    pair.run(3, 6, [1, 2], [3, 4])


def test_a_decode_worker_that_goes_away_and_comes_back(pair: Pair) -> None:
    pair.run(1, 5, [1], [2])
    pair.open_decode(2, 6, [3, 4], 8)
    pair.open_prefill(2, 6, 8)
    pair.prefill.wait(2, (PeerReady,))
    pair.prefill.worker.send(2, 0, _pages(3))
    port = pair.decode.worker.port
    pair.decode.worker.close(0.1)
    failed = pair.prefill.wait(2)
    assert isinstance(failed, KVFailed)
    assert failed.quiesced or pair.prefill.wait(2) == KVQuiesced(2)
    pair.decode = pair.new_decode(Place("127.0.0.1", (port, port)))
    pair.run(3, 6, [1, 2], [3, 4])


def test_a_worker_that_dies_without_a_word_is_found_within_a_second(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.open_decode(2, 6, [3, 4], 8)
    pair.open_prefill(2, 6, 8)
    pair.prefill.wait(2, (PeerReady,))
    monkeypatch.setattr(pair.prefill.worker, "on_stop", lambda: None)
    pair.prefill.worker.close(0.1)
    began = time.monotonic()
    failed = pair.decode.wait(2)
    assert time.monotonic() - began < 1.0
    assert failed.reason == "peer_lost" and "Lost connection with prefill instance" in failed.message
    assert not failed.quiesced
    assert pair.decode.wait(2) == KVQuiesced(2)


def test_nobody_at_the_bootstrap_address(pair: Pair) -> None:
    params = TransferParams("127.0.0.1", 1, 9)
    pair.decode.worker.open(1, "lost", params, _pages(1), 4, 0)
    failed = pair.decode.wait(1)
    assert failed.message.find("Decode handshake failed: bootstrap server 127.0.0.1:1") > 0 and failed.quiesced


@pytest.mark.parametrize(
    ("page_size", "dtype", "layout", "words"),
    [
        (8, "bfloat16", "test layout", "Page size mismatch"),
        (4, "float16", "test layout", "KV cache dtype mismatch"),
        (4, "bfloat16", "another", "KV layout mismatch"),
    ],
)
def test_servers_that_do_not_fit(pair: Pair, page_size: int, dtype: str, layout: str, words: str) -> None:
    pool, memory = make_pool(8)
    other = type(memory)(memory.addr, 8, memory.page_bytes, page_size, dtype, layout)
    decode = pair.new_decode(memory=(pool, other))
    pair.open_prefill(1, 9, 4)
    decode.worker.open(1, "misfit", pair.params(9), _pages(1), 4, 0)
    failed = decode.wait(1)
    assert words in pair.prefill.wait(1, seconds=2.0).message
    assert failed.status == 500 and words in failed.message and failed.quiesced


def test_what_is_not_a_message_is_ignored(pair: Pair) -> None:
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.PUSH) as socket:
        for side in (pair.prefill, pair.decode):
            socket.connect(f"tcp://127.0.0.1:{side.worker.port}")
        for frames in ([b""], [b"None", b"x"], [b"1", b"2", b"3"], [b"ABORT"], [b"AUX_DATA"] * 6, [b"\xff"] * 30):
            for _ in range(2):
                socket.send_multipart(frames)
        pair.run(1, 5, [1], [2])
    context.term()


def test_a_decode_server_that_cannot_be_served_hears_why(pair: Pair) -> None:
    pool, memory = make_pool(8, 768)
    other = type(memory)(memory.addr, 8, 768, memory.page_size, memory.dtype, memory.layout)
    decode = pair.new_decode(memory=(pool, other))
    pair.open_prefill(1, 9, 4)
    decode.worker.open(1, "misfit", pair.params(9), _pages(1), 4, 0)
    failed = decode.wait(1)
    assert isinstance(failed, KVFailed) and "its pages have 768 bytes, ours 512" in failed.message
    assert failed.quiesced or decode.wait(1) == KVQuiesced(1)
    assert isinstance(pair.prefill.wait(1, seconds=2.0), KVFailed)


def _hang(worker: PrefillWorker) -> threading.Event:
    """The worker says and hears nothing until the event is set, though its port is open: as on a host that vanished."""
    resumes, hangs = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        resumes.wait(30.0)

    worker.loop.call_soon_threadsafe(hang)
    assert hangs.wait(5.0)
    return resumes


def test_a_prefill_host_that_vanishes_is_shut_out_and_may_come_back(pair: Pair) -> None:
    """What it still sends when it is back lands nowhere; requests that follow are served."""
    pair.open_decode(2, 6, [3, 4], 8)
    pair.open_prefill(2, 6, 8)
    pair.prefill.wait(2, (PeerReady,))
    pair.prefill.worker.send(2, 0, _pages(3))
    until = time.monotonic() + 5
    while not (pair.decode.pool[3] == pair.prefill.pool[3]).all():
        assert time.monotonic() < until
    resumes = _hang(pair.prefill.worker)
    try:
        pair.prefill.worker.send(2, 1, _pages(4), LAST)
        failed = pair.decode.wait(2)
        assert failed.reason == "peer_lost" and not failed.quiesced
        assert pair.decode.wait(2, seconds=2.0) == KVQuiesced(2)
        pair.decode.pool[:] = 0
    finally:
        resumes.set()
    assert isinstance(pair.prefill.wait(2), KVFailed)
    pair.prefill.wait_idle()
    assert not pair.decode.pool.any()
    pair.run(3, 6, [1, 2], [3, 4])
    pair.decode.wait_idle()


class Unfenced(TcpTransport):
    """As the engines whose receiving side has no say."""

    def fence(self, sender: str) -> Fence | None:
        del sender
        return None


def test_pages_of_a_vanished_host_come_back_in_the_end_where_it_cannot_be_shut_out() -> None:
    pair = Pair(_timeouts(heartbeat_interval=0.2, quarantine_timeout=1.0), transport=Unfenced)
    try:
        pair.open_decode(2, 6, [3], 4)
        pair.open_prefill(2, 6, 4)
        pair.prefill.wait(2, (PeerReady,))
        resumes = _hang(pair.prefill.worker)
        try:
            began = time.monotonic()
            assert pair.decode.wait(2).reason == "peer_lost"
            assert pair.decode.wait(2) == KVQuiesced(2)
            assert 1.0 <= time.monotonic() - began < 3.0
        finally:
            resumes.set()
        assert isinstance(pair.prefill.wait(2), KVFailed)
        pair.run(3, 6, [1, 2], [3, 4])
    finally:
        pair.close()
