"""A prefill and a decode worker with pools of bytes, in one process."""

from __future__ import annotations

import asyncio
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from sglang_lite.disaggregation.base import Event, FirstToken, KVArrived, KVFailed, KVQuiesced, KVSent, PeerReady
from sglang_lite.disaggregation.bootstrap_server import bootstrap_site
from sglang_lite.disaggregation.decode_sessions import DecodeWorker
from sglang_lite.disaggregation.http_site import HttpSite
from sglang_lite.disaggregation.options import SessionOptions
from sglang_lite.disaggregation.pool_memory import PoolMemory
from sglang_lite.disaggregation.prefill_sessions import PrefillWorker
from sglang_lite.disaggregation.worker import Place, SessionWorker
from sglang_lite.transfer.base import KVTransport
from sglang_lite.transfer.tcp import TcpTransport
from sglang_lite.types import TransferParams

PAGE_SIZE = 4
PAGE_BYTES = 512
FAST = SessionOptions(
    bootstrap_timeout=20.0,
    waiting_timeout=20.0,
    heartbeat_interval=1.0,
    alive_interval=0.05,
    silence=0.2,
    gone_grace=0.2,
    resend=0.2,
    verify_checksums=True,
)
HERE = Place("127.0.0.1")
DECISIVE = (KVArrived, KVSent, KVFailed, KVQuiesced)


class SiteThread:
    """Runs an ``HttpSite`` on a loop of its own."""

    def __init__(self, site: HttpSite) -> None:
        self.site = site
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(site.start(), self._loop).result(10)

    def close(self) -> None:
        """Stop it."""
        asyncio.run_coroutine_threadsafe(self.site.stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Side:
    """A worker, its pool uint8[pages, bytes], and the events it told."""

    def __init__(self, worker: Any, pool: npt.NDArray[np.uint8]) -> None:
        self.worker = worker
        self.pool = pool
        self.seen: list[Event] = []

    def wait(self, key: int, kinds: tuple[type, ...] = DECISIVE, seconds: float = 10.0) -> Any:
        """The next event of one of these kinds about a request; later ones stay."""
        until = time.monotonic() + seconds
        while True:
            for at, event in enumerate(self.seen):
                if event.key == key and isinstance(event, kinds):
                    return self.seen.pop(at)
            left = until - time.monotonic()
            if left <= 0:
                raise AssertionError(f"none of {[kind.__name__ for kind in kinds]} about {key}; seen: {self.seen}")
            select.select([self.worker.fileno()], [], [], left)
            self.seen += self.worker.events()

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Until no session is live or in quarantine."""
        until = time.monotonic() + seconds
        while self.worker.stats().by_state or self.worker.stats().quarantined:
            assert time.monotonic() < until, self.worker.stats()
            select.select([self.worker.fileno()], [], [], 0.02)
            self.seen += self.worker.events()


def make_pool(num_pages: int, page_bytes: int = PAGE_BYTES) -> tuple[npt.NDArray[np.uint8], PoolMemory]:
    """Zeros, and how transfers see them."""
    pool = np.zeros((num_pages, page_bytes), dtype=np.uint8)
    return pool, PoolMemory(pool.ctypes.data, num_pages, page_bytes, PAGE_SIZE, "bfloat16", "test layout")


class Pair:
    """Bootstrap server, prefill side and decode side."""

    def __init__(
        self,
        options: SessionOptions = FAST,
        transport: Callable[[str], KVTransport] = TcpTransport,
        num_pages: int = 64,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        self.options, self._transport = options, transport
        self._num_pages, self._page_bytes = num_pages, page_bytes
        self.site = SiteThread(bootstrap_site("127.0.0.1", 0))
        self._sides: list[Side] = []
        self.prefill = self.new_prefill()
        self.decode = self.new_decode()

    def new_prefill(self, place: Place = HERE) -> Side:
        """Another prefill worker, registered with the same bootstrap server."""
        pool, memory = make_pool(self._num_pages, self._page_bytes)
        pool[:] = np.random.default_rng(7).integers(1, 255, pool.shape, dtype=np.uint8)
        bootstrap = ("127.0.0.1", self.site.site.port)
        worker = PrefillWorker(place, memory, self._transport("127.0.0.1"), self.options, bootstrap)
        side = self._start(worker, pool)
        until = time.monotonic() + 10
        while not worker.is_registered:
            assert time.monotonic() < until
            select.select([], [], [], 0.005)
        return side

    def new_decode(self, place: Place = HERE, memory: tuple[npt.NDArray[np.uint8], PoolMemory] | None = None) -> Side:
        """Another decode worker."""
        pool, described = memory or make_pool(self._num_pages, self._page_bytes)
        return self._start(DecodeWorker(place, described, self._transport("127.0.0.1"), self.options), pool)

    def params(self, room: int) -> TransferParams:
        """Those of a request."""
        return TransferParams("127.0.0.1", self.site.site.port, room, rid=f"request-{room}")

    def open_decode(self, key: int, room: int, pages: list[int], num_tokens: int, prefix: int = 0) -> None:
        """Offer pages."""
        where = np.array(pages, dtype=np.int32)
        self.decode.worker.open(key, f"request-{room}", self.params(room), where, num_tokens, prefix)

    def open_prefill(self, key: int, room: int, num_tokens: int) -> None:
        """Expect them."""
        self.prefill.worker.open(key, f"request-{room}", self.params(room), num_tokens)

    def run(self, key: int, room: int, source: list[int], target: list[int]) -> FirstToken:
        """A whole session of full pages."""
        self.open_prefill(key, room, len(source) * PAGE_SIZE)
        self.open_decode(key, room, target, len(target) * PAGE_SIZE)
        self.prefill.wait(key, (PeerReady,))
        self.prefill.worker.send(key, 0, np.array(source, dtype=np.int32), FirstToken(room))
        arrived = self.decode.wait(key)
        assert isinstance(arrived, KVArrived), arrived
        sent = self.prefill.wait(key)
        assert isinstance(sent, KVSent), sent
        assert (self.decode.pool[target] == self.prefill.pool[source]).all()
        return arrived.first

    def close(self) -> None:
        """Everything."""
        for side in self._sides:
            side.worker.close(1.0)
        self.site.close()

    def _start(self, worker: SessionWorker, pool: npt.NDArray[np.uint8]) -> Side:
        worker.start()
        side = Side(worker, pool)
        self._sides.append(side)
        return side


def say(side: Side, all_frames: list[list[bytes]]) -> None:
    """Messages to a worker's port, as anybody can send them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    out = context.socket(zmq.PUSH)
    out.connect(f"tcp://127.0.0.1:{side.worker.port}")
    for frames in all_frames:
        out.send_multipart(frames)
    out.close(5000)
    context.term()
