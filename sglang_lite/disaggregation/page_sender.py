"""Submits the pages of a session to one destination, and computes their checksums meanwhile."""

from __future__ import annotations

from sglang_lite.disaggregation.descriptor import page_checksums
from sglang_lite.disaggregation.pool_memory import PageShare
from sglang_lite.disaggregation.prefill_state import Destination, PrefillSession
from sglang_lite.disaggregation.worker import SessionWorker
from sglang_lite.transfer.base import TransferError
from sglang_lite.types import Int32Array

MOST_ROWS = 1 << 14
"""Spans of one transfer where pages are sent in part, row by row."""


class PageSender:
    """Uses the transport, the pool and the loop of a worker, on its thread."""

    def __init__(self, worker: SessionWorker) -> None:
        self._worker = worker

    def submit(self, session: PrefillSession, to: Destination, first_page: int, pages: Int32Array) -> None:
        """What the destination has of those pages that it wants.

        Args:
            first_page: number of ``pages[0]`` within the sequence.

        Raises:
            TransferError: a page has no place there, or the transport refuses.
        """
        worker = self._worker
        prefix = to.request.prefix_len // worker.memory.page_size
        own = pages[max(0, prefix - first_page) :]
        start = max(first_page, prefix) - prefix
        if to.request.pages is None or not len(own):
            return
        remote = to.request.pages[start : start + len(own)]
        if len(remote) != len(own):
            raise TransferError("rejected", f"page {start + len(own)} of the prompt has no place on the decode side")
        share = to.decode.share
        most = self._most_pages(share)
        for low in range(0, len(own), most):
            batch = worker.memory.spans(own[low : low + most], remote[low : low + most], share)
            transfer = worker.transport.submit(
                to.decode.peer,
                worker.lease,
                to.decode.region,
                batch,
                notify=b"",
                deadline_s=worker.options.waiting_timeout,
            )
            to.transfers.append(transfer)
            worker.counts["spans"] += len(batch)
            to.num_bytes += transfer.num_bytes
        to.num_pages += len(own)
        if worker.options.verify_checksums:
            session.hashing += 1
            worker.spawn(self._hash(session, to, start, own))

    def _most_pages(self, share: PageShare) -> int:
        """Of one transfer. What the engine cannot have under way at once waits in the adapter."""
        if share.is_whole:
            return self._worker.transport.capabilities().max_inflight_spans
        return max(1, MOST_ROWS // share.num_rows)

    async def _hash(self, session: PrefillSession, to: Destination, start: int, own: Int32Array) -> None:
        worker = self._worker
        pages = [worker.memory.part(index, to.decode.share) for index in own.tolist()]
        try:
            to.checksums[start] = await worker.loop.run_in_executor(worker.hashing, page_checksums, pages)
        finally:
            session.hashing -= 1
