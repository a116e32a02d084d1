"""What is transferred: from the slots of a prefill batch to page spans, and checksums over spans and contents."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_lite.types import TransferParams

_SPAN_TAG = b"sglang-rs.kv-transfer-span.v2\x00"
_SNAPSHOT_TAG = b"sglang-rs.kv-page-snapshot-batch.v1\x00"

IntArray = npt.NDArray[np.integer]


class PlanError(ValueError):
    """Slots that cannot be sent as whole pages."""


class NotPrefill(PlanError):
    """A decode batch has nothing to send."""


class BadPageSize(PlanError):
    """Pages hold at least one token."""


class TooFewSlots(PlanError):
    """A request has more tokens than the batch has slots left."""


class TrailingSlots(PlanError):
    """Slots that belong to no request."""


class UnalignedOffset(PlanError):
    """A span starts within a page of its sequence."""


class UnalignedSlot(PlanError):
    """A chunk of slots starts within a page of the pool."""


class NonContiguousSlots(PlanError):
    """The slots of a page do not follow one another."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a batch.

    Attributes:
        token_offset: tokens before the first of the batch (those the cache had).
        token_count: its slots in the batch.
        params: None for a request without a peer, whose slots are skipped.
    """

    rid: str
    token_offset: int
    token_count: int
    params: TransferParams | None
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a request, as slots and as pages of the pool.

    Attributes:
        slots: int64[token_count].
        pages: int64[ceil(token_count / page_size)].
    """

    rid: str
    params: TransferParams
    dp_rank: int
    token_offset: int
    token_count: int
    page_size: int
    slots: IntArray
    pages: IntArray

    def checksum(self) -> str:
        """64 lowercase hex digits that name the span on both sides."""
        digest = hashlib.sha256(_SPAN_TAG)
        for text in (self.rid, self.params.host):
            data = text.encode()
            digest.update(struct.pack("<Q", len(data)) + data)
        digest.update(struct.pack("<HQi", self.params.port, self.params.room, self.dp_rank))
        digest.update(struct.pack("<QQQ", self.token_offset, self.token_count, self.page_size))
        for numbers in (self.slots, self.pages):
            digest.update(struct.pack("<Q", len(numbers)) + numbers.astype("<u8").tobytes())
        return digest.hexdigest()


def plan(requests: Sequence[PlannedRequest], slots: IntArray, page_size: int, *, is_prefill: bool = True) -> list[Span]:
    """Cut the slots of a prefill batch into a span for every request that has a peer.

    Args:
        slots: int[n], where the tokens of the batch were written, request after request.

    Raises:
        PlanError: one of its subclasses says what does not fit.
    """
    if not is_prefill:
        raise NotPrefill("only a prefill batch is sent; this one decodes")
    if page_size < 1:
        raise BadPageSize(f"page size {page_size} is not possible; it is at least 1")
    spans, start = [], 0
    for request in requests:
        stop = start + request.token_count
        if stop > len(slots):
            raise TooFewSlots(f"request {request.rid} needs {request.token_count} slots; {len(slots) - start} are left")
        if request.params is not None:
            own = slots[start:stop]
            pages = page_indices(own, request.token_offset, page_size)
            spans.append(
                Span(
                    request.rid,
                    request.params,
                    request.dp_rank,
                    request.token_offset,
                    request.token_count,
                    page_size,
                    own,
                    pages,
                )
            )
        start = stop
    if start != len(slots):
        raise TrailingSlots(f"{len(slots) - start} slots after the last request belong to nobody")
    return spans


def page_indices(slots: IntArray, token_offset: int, page_size: int) -> IntArray:
    """int64[pages]: the pages that consecutive tokens fill, the last one perhaps in part.

    Raises:
        PlanError: they do not lie on whole pages.
    """
    if token_offset % page_size:
        raise UnalignedOffset(f"token offset {token_offset} is no multiple of the page size {page_size}")
    firsts = slots[::page_size].astype(np.int64)
    unaligned = np.flatnonzero(firsts % page_size)
    if len(unaligned):
        raise UnalignedSlot(f"slot {int(firsts[unaligned[0]])} starts a chunk but no page of {page_size} slots")
    expected = np.repeat(firsts, page_size)[: len(slots)] + np.arange(len(slots)) % page_size
    wrong = np.flatnonzero(expected != slots)
    if len(wrong):
        at = int(wrong[0])
        raise NonContiguousSlots(f"slot {int(slots[at])} stands where its page needs slot {int(expected[at])}")
    return firsts // page_size


def span_of_pages(rid: str, params: TransferParams, first_page: int, pages: IntArray, stop: int, size: int) -> Span:
    """The span of tokens [first_page * size, stop) that fill whole pages.

    Args:
        pages: int[n] of the pool.
        stop: the token after the last one.
    """
    offset = first_page * size
    slots = (pages.astype(np.int64)[:, None] * size + np.arange(size)).reshape(-1)[: stop - offset]
    return Span(rid, params, params.prefill_dp_rank or 0, offset, len(slots), size, slots, pages.astype(np.int64))


def snapshot_checksum(pages: Sequence[bytes | memoryview]) -> str:
    """64 lowercase hex digits over the contents of pages, in order."""
    digest = hashlib.sha256(_SNAPSHOT_TAG + struct.pack("<Q", len(pages)))
    for page in pages:
        digest.update(page)
    return digest.hexdigest()


def page_checksums(pages: Iterable[bytes | memoryview]) -> list[int]:
    """CRC-32 of every page; against damage on the way, not against attackers."""
    return [zlib.crc32(page) for page in pages]
