"""The memory that pages lie in, as transfers see it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sglang_lite.disaggregation.pairing import Heads, PairingError, heads_of
from sglang_lite.transfer.base import HOST, SpanBatch
from sglang_lite.types import Int32Array


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a page divides by heads: rows (layer, keys or values, token), each of the rank's heads in order.

    Attributes:
        total: heads of the whole model.
        own: those of this rank.
        head_bytes: of one head in one row.
    """

    total: int
    own: Heads
    head_bytes: int

    def row_bytes(self, heads: Heads) -> int:
        """Bytes of a row of a rank with those heads."""
        return heads.count * self.head_bytes


@dataclass(frozen=True, slots=True)
class PageShare:
    """The part of a page that a rank of the other side has as well.

    Attributes:
        own_offset, peer_offset: bytes from the start of a row, here and there.
        num_bytes: of a row that are common.
        own_row, peer_row: bytes of a row, here and there.
        num_rows: of a page.
    """

    own_offset: int
    peer_offset: int
    num_bytes: int
    own_row: int
    peer_row: int
    num_rows: int

    @property
    def is_whole(self) -> bool:
        """All of the page, on both sides."""
        return self.num_bytes == self.own_row == self.peer_row


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A page-major pool: page p is bytes [p * page_bytes, (p + 1) * page_bytes) from ``addr``.

    Attributes:
        page_size: tokens of a page.
        dtype, layout: must be the same on both sides; ``layout`` names layers, heads of the whole model and widths.
        read: copies a page to the host; None for memory of the host.
        heads: None where pages cannot be divided: every rank holds everything, or all sides are of one size.
    """

    addr: int
    num_pages: int
    page_bytes: int
    page_size: int
    dtype: str
    layout: str
    location: str = HOST
    read: Callable[[int], bytes] | None = None
    heads: HeadLayout | None = None

    @property
    def length(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    def share_with(self, rank: int, size: int) -> PageShare:
        """What a rank of the other side, of that tensor-parallel size, has of the same page.

        Raises:
            PairingError: it has nothing, or the heads cannot be split so.
        """
        if self.heads is None:
            return PageShare(0, 0, self.page_bytes, self.page_bytes, self.page_bytes, 1)
        own, theirs = self.heads.own, heads_of(self.heads.total, size, rank)
        common = own.common(theirs)
        if not common.count:
            raise PairingError(f"rank {rank} of {size} has none of the key/value heads {own.first} and following")
        width, own_row = self.heads.head_bytes, self.heads.row_bytes(own)
        return PageShare(
            (common.first - own.first) * width,
            (common.first - theirs.first) * width,
            common.count * width,
            own_row,
            self.heads.row_bytes(theirs),
            self.page_bytes // own_row,
        )

    def page(self, index: int) -> bytes | memoryview:
        """The bytes of a page, to be read."""
        if self.read is not None:
            return self.read(index)
        kind = ctypes.c_char * self.page_bytes
        return memoryview(kind.from_address(self.addr + index * self.page_bytes)).cast("B")

    def part(self, index: int, share: PageShare) -> bytes | memoryview:
        """The bytes of a page that are common, row after row, to be read."""
        page = self.page(index)
        if share.num_bytes == share.own_row:
            return page
        rows = np.frombuffer(page, dtype=np.uint8).reshape(share.num_rows, share.own_row)
        return rows[:, share.own_offset : share.own_offset + share.num_bytes].tobytes()

    def spans(self, own: Int32Array, remote: Int32Array, share: PageShare) -> SpanBatch:
        """From pages here to pages there: one span a page, or one a row where rows are shared in part."""
        sources = own.astype(np.int64) * self.page_bytes
        if share.is_whole:
            lengths = np.full(len(own), self.page_bytes, dtype=np.int64)
            return SpanBatch(sources, remote.astype(np.int64) * self.page_bytes, lengths)
        rows = np.arange(share.num_rows, dtype=np.int64)
        targets = remote.astype(np.int64) * (share.num_rows * share.peer_row)
        source = sources[:, None] + rows * share.own_row + share.own_offset
        target = targets[:, None] + rows * share.peer_row + share.peer_offset
        lengths = np.full(source.size, share.num_bytes, dtype=np.int64)
        return SpanBatch(source.reshape(-1), target.reshape(-1), lengths)
