"""What happens when a prefill rank says that all pages are there: the record and the checksums are looked at."""

from __future__ import annotations

from sglang_lite.disaggregation import frames as wire
from sglang_lite.disaggregation.base import KVArrived
from sglang_lite.disaggregation.decode_endings import DecodeEndings
from sglang_lite.disaggregation.decode_state import DecodeSession
from sglang_lite.disaggregation.decode_table import DecodeTable
from sglang_lite.disaggregation.descriptor import page_checksums
from sglang_lite.disaggregation.states import State, advance
from sglang_lite.disaggregation.worker import SessionWorker


class Arrival:
    """Uses the pool, the links and the events of a worker, on its thread."""

    def __init__(self, worker: SessionWorker, table: DecodeTable, endings: DecodeEndings) -> None:
        self._worker, self._table, self._endings = worker, table, endings

    def take(self, aux: wire.Aux) -> None:
        """The record of a session."""
        worker = self._worker
        session = self._table.generations.get(aux.generation)
        if session is None or session.link is None or session.params.room != aux.room:
            link = worker.links.heard(aux.instance, worker.loop.time())
            message = self._table.finished.get(aux.generation)
            if link is not None:
                why = "this session is over on the decode side" if message is None else message
                link.send(wire.AuxAck(aux.room, aux.generation, worker.instance, why).frames())
        elif not session.is_verifying and not session.state.is_over:
            session.is_verifying = True
            if worker.options.verify_checksums:
                session.task = worker.spawn(self._verify(session, aux.record))
            else:
                self._settle(session, aux.record, _wrong_count(session, aux.record))

    async def _verify(self, session: DecodeSession, record: wire.AuxRecord) -> None:
        worker = self._worker
        wrong = _wrong_count(session, record)
        if not wrong and len(record.checksums) != len(session.pages):
            wrong = f"{len(record.checksums)} checksums for {len(session.pages)} pages; both sides must verify"
        if not wrong:
            pages = [worker.memory.page(index) for index in session.pages.tolist()]
            own = await worker.loop.run_in_executor(worker.hashing, page_checksums, pages)
            bad = [at for at, (here, there) in enumerate(zip(own, record.checksums, strict=True)) if here != there]
            if bad:
                wrong = f"checksum mismatch: {len(bad)} of {len(own)} pages are damaged, the first is page {bad[0]}"
        if not session.state.is_over:
            self._settle(session, record, wrong)

    def _settle(self, session: DecodeSession, record: wire.AuxRecord, wrong: str) -> None:
        worker = self._worker
        if session.link is not None:
            ack = wire.AuxAck(session.params.room, session.generation, worker.instance, wrong)
            session.link.send(ack.frames())
        self._table.finished.put(session.generation, wrong)
        self._table.forget(session)
        if wrong:
            # Every transfer had ended before the record was sent.
            self._endings.report(session, 500, "corrupt", wrong, True)
            return
        session.state = advance(session.state, State.SUCCESS)
        worker.counts["transfers"] += 1
        worker.counts["spans"] += record.num_pages
        worker.counts["bytes"] += record.num_bytes
        worker.seconds += worker.loop.time() - session.opened
        worker.emit(KVArrived(session.key, record.first))


def _wrong_count(session: DecodeSession, record: wire.AuxRecord) -> str:
    if record.num_pages != len(session.pages):
        return f"{record.num_pages} pages were sent where {len(session.pages)} were wanted"
    return ""
