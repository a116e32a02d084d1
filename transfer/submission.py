"""What every submission is checked for, before an engine sees a span."""

from __future__ import annotations

from sglang_lite.transfer.base import Description, RegionLease, RemoteRegion, SpanBatch, TransferError
from sglang_lite.transfer.leases import Lease, check_spans
from sglang_lite.transfer.tcp_wire import MAX_NOTIFY, MAX_SPANS


def check_submission(
    src: RegionLease, told: Description | None, dst: RemoteRegion, spans: SpanBatch, note: bytes
) -> Lease:
    """Check a submission of a transport whose leases are ``Lease``.

    Args:
        told: what the peer said last; None when it is not known.

    Returns:
        The source.

    Raises:
        TransferError: names what is wrong.
    """
    if told is None:
        raise TransferError("closed", "this transport does not know the peer any more")
    if not isinstance(src, Lease) or not src.is_open:
        raise TransferError("rejected", "the source region is not registered with this transport any more")
    if dst not in told.regions:
        raise TransferError("rejected", f"the peer has no region {dst.region_id} of generation {dst.generation}")
    if len(spans) > MAX_SPANS or len(note) > MAX_NOTIFY:
        raise TransferError("rejected", f"at most {MAX_SPANS} spans and a notification of {MAX_NOTIFY} bytes")
    check_spans(spans, src.length, dst.length)
    return src
