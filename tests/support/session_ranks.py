"""The workers of a prefill and of a decode server with several tensor-parallel ranks, in one process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sglang_lite.disaggregation.base import FirstToken
from sglang_lite.disaggregation.bootstrap_server import bootstrap_site
from sglang_lite.disaggregation.decode_sessions import DecodeWorker
from sglang_lite.disaggregation.options import SessionOptions
from sglang_lite.disaggregation.pairing import heads_of
from sglang_lite.disaggregation.pool_memory import HeadLayout, PoolMemory
from sglang_lite.disaggregation.prefill_sessions import PrefillWorker
from sglang_lite.disaggregation.worker import Place
from sglang_lite.transfer.base import KVTransport
from sglang_lite.transfer.tcp import TcpTransport
from sglang_lite.types import TransferParams
from tests.support.session_pair import FAST, PAGE_SIZE, Side, SiteThread

NUM_PAGES = 16
Bytes = npt.NDArray[np.uint8]


class Servers:
    """The ranks of a prefill and of a decode server.

    Args:
        total: heads of the model; 0 when every rank has the same rows.
        start: the workers.
        page: tokens of a page, its rows, and bytes of a head in a row.

    Attributes:
        whole: uint8[pages, rows, heads, width] of all heads, on the prefill side.
    """

    def __init__(
        self,
        prefill_size: int,
        decode_size: int,
        total: int,
        transport: Callable[[str], KVTransport] = TcpTransport,
        *,
        start: bool = True,
        options: SessionOptions = FAST,
        page: tuple[int, int, int] = (PAGE_SIZE, 6, 8),
    ) -> None:
        self._total, self._transport, self._start, self._options = total, transport, start, options
        self._page_size, num_rows, self._width = page
        self.site = SiteThread(bootstrap_site("127.0.0.1", 0))
        shape = (NUM_PAGES, num_rows, max(1, total), self._width)
        self.whole = np.random.default_rng(3).integers(1, 255, shape, dtype=np.uint8)
        self.prefill = [self._rank(PrefillWorker, rank, prefill_size) for rank in range(prefill_size)]
        self.decode = [self._rank(DecodeWorker, rank, decode_size) for rank in range(decode_size)]
        for side in self.prefill:
            side.pool[:] = self.part(self.whole, self.prefill.index(side), prefill_size)

    def part(self, whole: Bytes, rank: int, size: int) -> Bytes:
        """A rank's heads."""
        heads = heads_of(max(1, self._total), size, rank)
        return whole if not self._total else whole[:, :, heads.first : heads.first + heads.count]

    def _rank(self, kind: type[PrefillWorker] | type[DecodeWorker], rank: int, size: int) -> Side:
        pool = np.zeros_like(np.ascontiguousarray(self.part(self.whole, rank, size)))
        heads = HeadLayout(self._total, heads_of(self._total, size, rank), self._width) if self._total else None
        page_bytes = pool[0].nbytes
        memory = PoolMemory(pool.ctypes.data, NUM_PAGES, page_bytes, self._page_size, "bfloat16", "all", heads=heads)
        place = Place("127.0.0.1", None, rank, size, kv_replicated=not self._total)
        transport = self._transport("127.0.0.1")
        if kind is PrefillWorker:
            worker: PrefillWorker | DecodeWorker = PrefillWorker(
                place, memory, transport, self._options, ("127.0.0.1", self.site.site.port)
            )
        else:
            worker = DecodeWorker(place, memory, transport, self._options)
        if self._start:
            worker.start()
        return Side(worker, pool)

    def open(self, key: int, room: int, num_pages: int, target: list[int]) -> None:
        """On all ranks."""
        params = TransferParams("127.0.0.1", self.site.site.port, room)
        where = np.array(target, dtype=np.int32)
        for side in self.decode:
            side.worker.open(key, f"r{room}", params, where, num_pages * self._page_size, 0)
        for side in self.prefill:
            side.worker.open(key, f"r{room}", params, num_pages * self._page_size)

    def send(self, key: int, source: list[int]) -> None:
        """All of it, from all ranks."""
        for side in self.prefill:
            side.worker.send(key, 0, np.array(source, dtype=np.int32), FirstToken(key))

    def close(self) -> None:
        """All of them."""
        for side in (*self.prefill, *self.decode):
            side.worker.close(1.0)
        self.site.close()
