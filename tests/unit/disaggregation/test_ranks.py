"""Workers of servers with different tensor-parallel sizes: every decode rank gets its heads, whoever has them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest

from sglang_lite.disaggregation.base import FirstToken, KVArrived, KVFailed, KVQuiesced, KVSent, PeerReady
from sglang_lite.disaggregation.bootstrap_server import bootstrap_site
from sglang_lite.disaggregation.decode_sessions import DecodeWorker
from sglang_lite.disaggregation.pairing import heads_of
from sglang_lite.disaggregation.pool_memory import HeadLayout, PoolMemory
from sglang_lite.disaggregation.prefill_sessions import PrefillWorker
from sglang_lite.disaggregation.worker import Place
from sglang_lite.transfer.tcp import TcpTransport
from sglang_lite.types import TransferParams
from tests.support.session_pair import FAST, PAGE_SIZE, Side, SiteThread

NUM_PAGES, NUM_ROWS, WIDTH = 16, 6, 8


class Servers:
    """The ranks of a prefill and of a decode server.

    Args:
        total: heads of the model; 0 when every rank has the same rows.

    Attributes:
        whole: uint8[pages, rows, heads, width] of all heads, on the prefill side.
    """

    def __init__(self, prefill_size: int, decode_size: int, total: int) -> None:
        self._total = total
        self.site = SiteThread(bootstrap_site("127.0.0.1", 0))
        shape = (NUM_PAGES, NUM_ROWS, max(1, total), WIDTH)
        self.whole = np.random.default_rng(3).integers(1, 255, shape, dtype=np.uint8)
        self.prefill = [self._rank(PrefillWorker, rank, prefill_size) for rank in range(prefill_size)]
        self.decode = [self._rank(DecodeWorker, rank, decode_size) for rank in range(decode_size)]
        for side in self.prefill:
            side.pool[:] = self.part(self.whole, self.prefill.index(side), prefill_size)

    def part(self, whole: np.ndarray, rank: int, size: int) -> np.ndarray:
        """A rank's heads."""
        heads = heads_of(max(1, self._total), size, rank)
        return whole if not self._total else whole[:, :, heads.first : heads.first + heads.count]

    def _rank(self, kind: type, rank: int, size: int) -> Side:
        pool = np.zeros_like(np.ascontiguousarray(self.part(self.whole, rank, size)))
        heads = HeadLayout(self._total, heads_of(self._total, size, rank), WIDTH) if self._total else None
        page_bytes = pool[0].nbytes
        memory = PoolMemory(pool.ctypes.data, NUM_PAGES, page_bytes, PAGE_SIZE, "bfloat16", "all", heads=heads)
        place = Place("127.0.0.1", None, rank, size, kv_replicated=not self._total)
        transport = TcpTransport("127.0.0.1")
        if kind is PrefillWorker:
            worker: PrefillWorker | DecodeWorker = PrefillWorker(
                place, memory, transport, FAST, ("127.0.0.1", self.site.site.port)
            )
        else:
            worker = DecodeWorker(place, memory, transport, FAST)
        worker.start()
        return Side(worker, pool)

    def open(self, key: int, room: int, num_pages: int, target: list[int]) -> None:
        """On all ranks."""
        params = TransferParams("127.0.0.1", self.site.site.port, room)
        where = np.array(target, dtype=np.int32)
        for side in self.decode:
            side.worker.open(key, f"r{room}", params, where, num_pages * PAGE_SIZE, 0)
        for side in self.prefill:
            side.worker.open(key, f"r{room}", params, num_pages * PAGE_SIZE)

    def send(self, key: int, source: list[int]) -> None:
        """All of it, from all ranks."""
        for side in self.prefill:
            side.worker.send(key, 0, np.array(source, dtype=np.int32), FirstToken(key))

    def close(self) -> None:
        for side in (*self.prefill, *self.decode):
            side.worker.close(1.0)
        self.site.close()


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
