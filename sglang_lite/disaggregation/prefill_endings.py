"""How sessions of a prefill worker end without success, and what decode ranks are told meanwhile."""

from __future__ import annotations

import logging

from sglang_lite.disaggregation import frames as wire
from sglang_lite.disaggregation.base import KVFailed, KVQuiesced
from sglang_lite.disaggregation.prefill_state import Destination, PrefillSession
from sglang_lite.disaggregation.prefill_table import PrefillTable
from sglang_lite.disaggregation.states import State
from sglang_lite.disaggregation.waiting_rooms import WaitingRooms
from sglang_lite.disaggregation.worker import SessionWorker

logger = logging.getLogger(__name__)


class PrefillEndings:
    """Uses the links, the clock and the events of a worker, on its thread."""

    def __init__(self, worker: SessionWorker, table: PrefillTable, waiting: WaitingRooms) -> None:
        self._worker, self._table, self._waiting = worker, table, waiting

    def answer(self, request: wire.Request, state: State, code: str = "", message: str = "") -> None:
        """Tell a decode rank how its session stands."""
        worker = self._worker
        try:
            link = worker.link_to(request.ip, request.port, request.instance)
        except OSError as error:
            logger.warning("cannot answer decode server %s:%d: %s", request.ip, request.port, error)
            return
        rank = worker.place.tp_rank
        link.send(
            wire.Status(request.room, state, rank, request.generation, worker.instance, code, message[:1000]).frames()
        )

    def fail(self, session: PrefillSession, status: int, reason: str, message: str) -> None:
        """End a session; status 0 when the core itself wanted that."""
        worker = self._worker
        session.state = State.FAILED
        worker.failures[reason] += 1
        text = f"KV transfer failed for room {session.params.room} to {session.peers}: {message}"
        logger.warning("prefill session of request %s at %s:%d: %s", session.rid, worker.place.host, worker.port, text)
        self._table.leave(session)
        self._waiting.note_failed(session.params.room, message, worker.loop.time())
        for destination in session.destinations:
            for transfer in destination.transfers:
                transfer.abort()
            self.answer(destination.request, State.FAILED, reason, message)
        quiesced = session.is_quiesced
        if status:
            worker.emit(KVFailed(session.key, status, text, quiesced, reason))
        if quiesced:
            self._rest(session)
            if not status:
                worker.emit(KVQuiesced(session.key))
        else:
            session.over_since = worker.loop.time()
            self._table.over[session.key] = session
            worker.arm_poll()

    def drain(self, now: float) -> bool:
        """Look after what is over but not quiet; True while there is any."""
        for session in list(self._table.over.values()):
            for destination in session.destinations:
                if destination.wants_drained and destination.is_quiesced:
                    self._answer_drained(destination)
            if session.is_quiesced:
                self._rest(session)
                self._release(session)
            elif now > session.over_since + self._worker.options.quarantine_timeout:
                # They are only read, and for a session whose bytes nobody takes any more. It is not said to be quiet.
                self._release(session)
        return bool(self._table.over)

    def _release(self, session: PrefillSession) -> None:
        if not session.is_released:
            session.is_released = True
            self._worker.emit(KVQuiesced(session.key))

    def peer_aborts(self, abort: wire.Abort) -> None:
        """A decode rank ends its session, and wants to know when nothing is written any more."""
        found = self._table.find((abort.instance, abort.room, abort.generation))
        if found is None:
            self._abort_unknown(abort)
            return
        session, destination = found
        destination.wants_drained = True
        if not session.state.is_over:
            self.fail(session, 500, "peer_aborted", f"the decode side ended it: {abort.message or 'aborted'}")
        elif destination.is_quiesced:
            self._answer_drained(destination)

    def _abort_unknown(self, abort: wire.Abort) -> None:
        """Nothing was, or will be, written for this generation."""
        worker = self._worker
        name = (abort.instance, abort.room, abort.generation)
        self._waiting.drop(name)
        # The other ranks of the decode server tell the same; the room may be in use again by then.
        is_news = self._table.attempts.get(abort.attempt) is None
        self._table.note(name, abort.attempt, State.FAILED)
        try:
            link = worker.link_to(abort.ip, abort.port, abort.instance)
        except OSError as error:
            logger.warning("cannot answer an abort: %s", error)
            return
        link.send(wire.AbortAck(abort.room, worker.place.tp_rank, abort.generation, worker.instance).frames())
        if abort.target not in ("", worker.instance):
            return
        session = self._table.rooms.get(abort.room)
        why = f"{abort.message or 'aborted'} (decode server {abort.ip}:{abort.port})"
        if session is None and is_news:
            self._waiting.note_aborted(abort.room, why, worker.loop.time())
        elif session is not None and is_news and not session.destinations:
            self.fail(session, 500, "peer_aborted", f"the decode side ended it: {why}")

    def _rest(self, session: PrefillSession) -> None:
        for destination in session.destinations:
            self._answer_drained(destination)
        self._table.forget(session)

    def _answer_drained(self, destination: Destination) -> None:
        destination.wants_drained = False
        request, worker = destination.request, self._worker
        ack = wire.AbortAck(request.room, worker.place.tp_rank, request.generation, worker.instance)
        destination.decode.link.send(ack.frames())
