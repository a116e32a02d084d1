"""What happens when a prefill rank says that its pages are there: the record and the checksums are looked at."""

from __future__ import annotations

from sglang_lite.disaggregation import frames as wire
from sglang_lite.disaggregation.base import KVArrived
from sglang_lite.disaggregation.decode_endings import DecodeEndings
from sglang_lite.disaggregation.decode_state import DecodeSession, PrefillSource
from sglang_lite.disaggregation.decode_table import DecodeTable
from sglang_lite.disaggregation.descriptor import page_checksums
from sglang_lite.disaggregation.states import State, advance
from sglang_lite.disaggregation.worker import SessionWorker


class Arrival:
    """Uses the pool, the links and the events of a worker, on its thread. A session has arrived with its last part."""

    def __init__(self, worker: SessionWorker, table: DecodeTable, endings: DecodeEndings) -> None:
        self._worker, self._table, self._endings = worker, table, endings

    def take(self, aux: wire.Aux) -> None:
        """The record of a prefill rank."""
        session = self._table.generations.get(aux.generation)
        source = session.source(aux.rank) if session is not None else None
        if session is None or source is None or session.params.room != aux.room:
            self._answer_late(aux)
        elif source.is_settled and not session.state.is_over:
            self._answer(session, source, "")  # the first answer was lost
        elif source.record is None and not session.state.is_over:
            source.record = aux.record
            if self._worker.options.verify_checksums and source.sends:
                self._worker.spawn(self._verify(session, source, aux.record))
            else:
                self._settle(session, source, _wrong_count(session, source, aux.record))

    def _answer_late(self, aux: wire.Aux) -> None:
        worker = self._worker
        link = worker.links.heard(aux.instance, worker.loop.time())
        message = self._table.finished.get(aux.generation)
        if link is not None:
            why = "this session is over on the decode side" if message is None else message
            link.send(wire.AuxAck(aux.room, aux.generation, worker.instance, why).frames())

    def _answer(self, session: DecodeSession, source: PrefillSource, wrong: str) -> None:
        worker = self._worker
        source.link.send(wire.AuxAck(session.params.room, session.generation, worker.instance, wrong).frames())

    async def _verify(self, session: DecodeSession, source: PrefillSource, record: wire.AuxRecord) -> None:
        worker, share = self._worker, source.share
        wrong = _wrong_count(session, source, record)
        if not wrong and len(record.checksums) != len(session.pages):
            wrong = f"{len(record.checksums)} checksums for {len(session.pages)} pages; both sides must verify"
        if not wrong and share is not None:
            pages = [worker.memory.part(index, share) for index in session.pages.tolist()]
            own = await worker.loop.run_in_executor(worker.hashing, page_checksums, pages)
            bad = [at for at, (here, there) in enumerate(zip(own, record.checksums, strict=True)) if here != there]
            if bad:
                wrong = f"checksum mismatch: {len(bad)} of {len(own)} pages are damaged, the first is page {bad[0]}"
        if not session.state.is_over:
            self._settle(session, source, wrong)

    def _settle(self, session: DecodeSession, source: PrefillSource, wrong: str) -> None:
        self._answer(session, source, wrong)
        # Every transfer of the rank had ended before it sent the record.
        source.is_drained = True
        source.is_settled = not wrong
        if wrong:
            self._table.finished.put(session.generation, wrong)
            self._endings.fail(session, 500, "corrupt", wrong)
        elif all(other.is_settled for other in session.sources):
            self._arrived(session)

    def _arrived(self, session: DecodeSession) -> None:
        worker = self._worker
        records = [source.record for source in session.sources if source.record is not None]
        self._table.finished.put(session.generation, "")
        self._table.forget(session)
        session.state = advance(session.state, State.SUCCESS)
        worker.counts["transfers"] += 1
        worker.counts["spans"] += sum(record.num_pages for record in records)
        num_bytes, seconds = sum(record.num_bytes for record in records), worker.loop.time() - session.opened
        worker.counts["bytes"] += num_bytes
        worker.seconds += seconds
        worker.distributions.observe_transfer(num_bytes, seconds)
        worker.emit(KVArrived(session.key, records[0].first))


def _wrong_count(session: DecodeSession, source: PrefillSource, record: wire.AuxRecord) -> str:
    wanted = len(session.pages) if source.sends else 0
    return f"{record.num_pages} pages were sent where {wanted} were wanted" if record.num_pages != wanted else ""
