"""The memory that pages lie in, as transfers see it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sglang_lite.transfer.base import HOST, SpanBatch
from sglang_lite.types import Int32Array


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A page-major pool: page p is bytes [p * page_bytes, (p + 1) * page_bytes) from ``addr``.

    Attributes:
        page_size: tokens of a page.
        dtype, layout: must be the same on both sides; ``layout`` names layers, heads and widths.
        read: copies a page to the host; None for memory of the host.
    """

    addr: int
    num_pages: int
    page_bytes: int
    page_size: int
    dtype: str
    layout: str
    location: str = HOST
    read: Callable[[int], bytes] | None = None

    @property
    def length(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    def page(self, index: int) -> bytes | memoryview:
        """The bytes of a page, to be read."""
        if self.read is not None:
            return self.read(index)
        kind = ctypes.c_char * self.page_bytes
        return memoryview(kind.from_address(self.addr + index * self.page_bytes)).cast("B")

    def spans(self, own: Int32Array, remote: Int32Array) -> SpanBatch:
        """One span a page, from pages here to pages there."""
        size = np.int64(self.page_bytes)
        lengths = np.full(len(own), size, dtype=np.int64)
        return SpanBatch(own.astype(np.int64) * size, remote.astype(np.int64) * size, lengths)
