"""How sessions of a decode worker end without success, and how their prefill ranks are made to stop writing."""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from sglang_lite.disaggregation import frames as wire
from sglang_lite.disaggregation.base import KVFailed, KVQuiesced
from sglang_lite.disaggregation.bootstrap_client import HandshakeError
from sglang_lite.disaggregation.decode_state import DecodeSession
from sglang_lite.disaggregation.decode_table import DecodeTable
from sglang_lite.disaggregation.links import Link
from sglang_lite.disaggregation.prefill_directory import PrefillDirectory
from sglang_lite.disaggregation.states import State
from sglang_lite.disaggregation.worker import SessionWorker
from sglang_lite.types import Int32Array, TransferParams

logger = logging.getLogger(__name__)

_NO_PAGES: Int32Array = np.zeros(0, dtype=np.int32)


class DecodeEndings:
    """Uses the links, the clock and the events of a worker, on its thread.

    Attributes:
        directory: set when the loop runs.
    """

    def __init__(self, worker: SessionWorker, table: DecodeTable) -> None:
        self._worker, self._table = worker, table
        self.directory: PrefillDirectory | None = None

    def fail(self, session: DecodeSession, status: int, reason: str, message: str) -> None:
        """End a session; status 0 when the core itself wanted that."""
        if session.link is None:
            self._table.forget(session)
            if session.task is not None and session.task is not asyncio.current_task(self._worker.loop):
                session.task.cancel()
            self.report(session, status, reason, message, True)
            if reason != "closed":
                self.refuse(session.rid, session.params, message)
            return
        session.state = State.FAILED
        session.why, session.over_since = message, self._worker.loop.time()
        self._table.quarantine(session)
        self.report(session, status, reason, message, False)
        self.send_abort(session)

    def report(self, session: DecodeSession, status: int, reason: str, message: str, quiesced: bool) -> None:
        """Tell the core that a session is over."""
        worker = self._worker
        worker.failures[reason] += 1
        session.state = State.FAILED
        text = f"KV transfer failed for room {session.params.room} from {session.peer}: {message}"
        logger.warning("decode session of request %s at %s:%d: %s", session.rid, worker.place.host, worker.port, text)
        if status:
            worker.emit(KVFailed(session.key, status, text, quiesced, reason))
        elif quiesced:
            worker.emit(KVQuiesced(session.key))

    def refuse(self, rid: str, params: TransferParams, message: str) -> None:
        """Tell the prefill side of a request that was given up before its prefill rank was known."""
        now, generation = self._worker.loop.time(), self._table.next_generation()
        session = DecodeSession(-generation, rid, params, _NO_PAGES, 0, 0, generation, now, now, State.FAILED)
        session.why = message
        if params.room not in self._table.rooms:
            self._table.quarantine(session)
            self._worker.spawn(self._tell_refusal(session))

    async def _tell_refusal(self, session: DecodeSession) -> None:
        worker = self._worker
        try:
            if self.directory is None:
                return
            address = await self.directory.find(session.params, 0.0, must_fit=False)
            link = worker.link_to(address.rank_ip, address.rank_port, address.instance or "")
            link.begin(session.key, worker.loop.time())
            session.link = link
            self.send_abort(session)
        except (HandshakeError, OSError) as error:
            logger.warning("%s does not hear that its request %s was given up: %s", session.peer, session.rid, error)
        finally:
            if session.link is None:
                self._table.forget(session)

    def send_abort(self, session: DecodeSession) -> None:
        """Ask the prefill rank to write no more, and to say when it is so."""
        worker = self._worker
        session.request_sent = worker.loop.time()
        if session.link is None:
            return
        who = (session.params.room, worker.place.host, worker.port, session.generation, worker.instance)
        session.link.send(wire.Abort(*who, session.why[:1000], session.link.instance).frames())

    def look_after(self, now: float) -> None:
        """Sessions in quarantine: send aborts again, and shut out prefill ranks whose hosts have vanished."""
        worker = self._worker
        over = [session for session in self._table.over.values() if session.link is not None]
        for link in {session.link for session in over if session.link is not None and session.link.is_lost}:
            waiting = [session for session in over if session.link is link and session.fence is None]
            if waiting:
                self._shut_out(link, waiting, now)
        for session in over:
            if session.fence is not None and session.fence.quiesced:
                self._rest(session)
            elif now - session.request_sent > worker.options.resend and session.key in self._table.over:
                worker.counts["retries"] += 1
                self.send_abort(session)

    def _shut_out(self, link: Link, sessions: list[DecodeSession], now: float) -> None:
        worker = self._worker
        fence = worker.transport.fence(link.instance) if link.instance else None
        if fence is not None:
            # It is told of the pool again before it gets another request, and then may write again.
            self._table.registered.discard(link.instance)
            for session in sessions:
                session.fence = fence
            return
        patience = worker.options.quarantine_timeout
        for session in sessions:
            if now > patience + max(session.over_since, link.last_word):
                logger.warning(
                    "%s was not heard for %.0f s: the pages of request %s are used again, though it was never "
                    "confirmed that nothing is written into them",
                    session.peer,
                    now - link.last_word,
                    session.rid,
                )
                self._rest(session)

    def drained(self, ack: wire.AbortAck) -> None:
        """The prefill rank writes no more."""
        session = self._table.generations.get(ack.generation)
        if session is not None and session.key in self._table.over and not self.is_replaced(session, ack.instance):
            self._rest(session)

    def is_replaced(self, session: DecodeSession, instance: str) -> bool:
        """Another process answers at the address of the session's prefill rank, which is gone therefore."""
        link = session.link
        if link is None or link.instance in ("", instance):
            return False
        self._worker.bury(link)
        return True

    def peer_gone(self, link: Link) -> None:
        """A prefill rank's process has ended; its last bytes arrive within moments, or never."""
        self._worker.loop.call_later(self._worker.options.gone_grace, self._rest_all, link)

    def _rest_all(self, link: Link) -> None:
        for session in list(self._table.over.values()):
            if session.link is link:
                self._rest(session)

    def _rest(self, session: DecodeSession) -> None:
        self._table.forget(session)
        if session.key >= 0:
            self._worker.emit(KVQuiesced(session.key))
