"""Plans from slots to pages, and the published checksums."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_lite.disaggregation import descriptor
from sglang_lite.disaggregation.descriptor import PlannedRequest, page_checksums, plan, snapshot_checksum, span_of_pages
from sglang_lite.types import TransferParams


def _slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def _request(offset: int, count: int, rid: str = "r") -> PlannedRequest:
    return PlannedRequest(rid, offset, count, TransferParams("h", 1, 2))


def test_golden_checksums() -> None:
    params = TransferParams("127.0.0.1", 8998, 7)
    (span,) = plan([PlannedRequest("request-7", 2, 2, params)], _slots(0, 1), 1)
    assert span.pages.tolist() == [0, 1]
    assert span.checksum() == "c9925918846ed8e6e2b365946a888fe9c1f17f21ac61020b533647bb1917a462"
    params = TransferParams("prefill.local", 8998, 42)
    (span,) = plan([PlannedRequest("req", 4, 6, params, dp_rank=1)], _slots(8, 9, 10, 11, 12, 13), 4)
    assert span.pages.tolist() == [2, 3]
    assert span.checksum() == "5e1f11ea5d35d7375087878796cd0fe5a67be6083ac8ef6a87d22770a13e954e"
    same = span_of_pages("req", TransferParams("prefill.local", 8998, 42, 1), 1, _slots(2, 3), 10, 4)
    assert same.checksum() == span.checksum()


def test_requests_without_a_peer_are_walked_over() -> None:
    plain = PlannedRequest("plain", 1, 3, None)
    spans = plan([plain, _request(4, 4, "sent")], _slots(1, 2, 9, 20, 21, 22, 23), 4)
    assert [(span.rid, span.pages.tolist(), span.slots.tolist()) for span in spans] == [("sent", [5], [20, 21, 22, 23])]


@pytest.mark.parametrize(
    ("requests", "slots", "page_size", "error"),
    [
        ([_request(3, 2)], (4, 5), 2, descriptor.UnalignedOffset),
        ([_request(0, 4)], (5, 6, 7, 8), 4, descriptor.UnalignedSlot),
        ([_request(0, 4)], (4, 5, 7, 6), 4, descriptor.NonContiguousSlots),
        ([_request(0, 3)], (4, 5), 4, descriptor.TooFewSlots),
        ([_request(0, 1)], (4, 5), 4, descriptor.TrailingSlots),
        ([_request(0, 1)], (4,), 0, descriptor.BadPageSize),
    ],
)
def test_plans_that_cannot_be(
    requests: list[PlannedRequest], slots: tuple[int, ...], page_size: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        plan(requests, _slots(*slots), page_size)


def test_a_decode_batch_has_no_plan() -> None:
    with pytest.raises(descriptor.NotPrefill):
        plan([], _slots(), 4, is_prefill=False)


def test_content_checksums_tell_one_changed_byte() -> None:
    pages = [bytes(range(64)), bytes(64)]
    changed = [pages[0], bytes(63) + b"\1"]
    assert snapshot_checksum(pages) == snapshot_checksum([memoryview(page) for page in pages])
    assert snapshot_checksum(pages) != snapshot_checksum(changed)
    assert snapshot_checksum(pages) != snapshot_checksum(pages[:1])
    here, there = page_checksums(pages), page_checksums(changed)
    assert here[0] == there[0] and here[1] != there[1]
