"""The way of a prompt's pages and its first token to the decode ranks."""

from __future__ import annotations

import collections

from sglang_lite.disaggregation import frames as wire
from sglang_lite.disaggregation.base import KVSent
from sglang_lite.disaggregation.descriptor import span_of_pages
from sglang_lite.disaggregation.page_sender import PageSender
from sglang_lite.disaggregation.prefill_endings import PrefillEndings
from sglang_lite.disaggregation.prefill_state import PrefillSession
from sglang_lite.disaggregation.prefill_table import PrefillTable
from sglang_lite.disaggregation.states import State, advance
from sglang_lite.disaggregation.worker import SessionWorker
from sglang_lite.transfer.base import TransferError
from sglang_lite.types import Int32Array

MOST_REMEMBERED = 256


class Delivery:
    """Uses the transport, the links and the events of a worker, on its thread.

    Attributes:
        completed: descriptor checksums of the latest spans that arrived.
    """

    def __init__(self, worker: SessionWorker, table: PrefillTable, endings: PrefillEndings) -> None:
        self._worker, self._table, self._endings = worker, table, endings
        self._sender = PageSender(worker)
        self.completed: collections.deque[str] = collections.deque(maxlen=MOST_REMEMBERED)

    def submit(self, session: PrefillSession, first_page: int, pages: Int32Array) -> None:
        """Pages that are written, to every destination that wants them."""
        if session.state.is_over or not len(pages):
            return
        if session.state is not State.TRANSFERRING:
            session.state = advance(session.state, State.TRANSFERRING)
            session.started = self._worker.loop.time()
            for destination in session.destinations:
                self._endings.answer(destination.request, session.state)
        size = self._worker.memory.page_size
        stop = min((first_page + len(pages)) * size, session.num_tokens)
        span = span_of_pages(session.rid, session.params, first_page, pages, stop, size)
        session.spans.append(span.checksum())
        for destination in session.destinations:
            try:
                self._sender.submit(session, destination, first_page, pages)
            except TransferError as error:
                self._endings.fail(session, 500, error.reason, f"pages cannot be sent: {error}")
                return

    def look_after(self, now: float) -> bool:
        """Transfers that ended; True while some are under way."""
        busy = False
        for session in list(self._table.keys.values()):
            if session.state is State.TRANSFERRING or session.last is not None:
                busy |= self._look_after(session, now)
        return busy

    def _look_after(self, session: PrefillSession, now: float) -> bool:
        failed = session.first_failed()
        if failed is not None:
            message = f"the transfer failed: {failed.detail}"
            self._endings.fail(session, 500, failed.reason or "engine", message)
            return False
        if not session.is_delivered:
            return session.is_ready
        if session.aux_sent == 0.0:
            self.send_record(session, now)
        return False

    def send_record(self, session: PrefillSession, now: float) -> None:
        """The first token and the checksums, to destinations that have not confirmed them."""
        session.aux_sent = now
        first = session.last
        if first is None:
            return
        worker = self._worker
        for destination in session.destinations:
            if not destination.is_confirmed:
                record = destination.record(first)
                name = (session.params.room, worker.place.tp_rank, destination.request.generation, worker.instance)
                destination.decode.link.send(wire.Aux(*name, record).frames())

    def confirmed(self, ack: wire.AuxAck) -> None:
        """A destination has everything, or refuses it."""
        found = self._table.find((ack.instance, ack.room, ack.generation))
        if found is None or found[0].state.is_over or not found[0].aux_sent:
            return
        session, destination = found
        if ack.message:
            self._endings.fail(session, 500, "peer_failed", f"the decode server refuses the KV: {ack.message}")
            return
        destination.is_confirmed = True
        if all(other.is_confirmed for other in session.destinations):
            self._succeed(session)

    def _succeed(self, session: PrefillSession) -> None:
        worker = self._worker
        session.state = advance(session.state, State.SUCCESS)
        seconds = worker.loop.time() - (session.started or session.aux_sent)
        worker.seconds += seconds
        worker.counts["transfers"] += 1
        worker.counts["completed"] += len(session.spans)
        self.completed.extend(session.spans)
        num_bytes = sum(other.num_bytes for other in session.destinations)
        worker.counts["bytes"] += num_bytes
        worker.distributions.observe_transfer(num_bytes, seconds)
        for destination in session.destinations:
            self._endings.answer(destination.request, State.SUCCESS)
        self._table.leave(session)
        self._table.forget(session)
        worker.emit(KVSent(session.key))
