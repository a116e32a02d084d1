"""How sessions of a decode worker end without success, and how their prefill ranks are made to stop writing."""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from sglang_lite.disaggregation import frames as wire
from sglang_lite.disaggregation.base import KVFailed, KVQuiesced
from sglang_lite.disaggregation.bootstrap_client import HandshakeError
from sglang_lite.disaggregation.decode_state import DecodeSession, PrefillSource
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
        if session.is_drained:
            self._table.forget(session)
            if session.task is not None and session.task is not asyncio.current_task(self._worker.loop):
                session.task.cancel()
            self.report(session, status, reason, message, True)
            if reason != "closed" and not session.sources and self._worker.place.tp_rank == 0:
                self.refuse(session.rid, session.params, message, (session.group, session.generation))
            return
        session.state = State.FAILED
        session.why, session.over_since = message, self._worker.loop.time()
        self._table.quarantine(session)
        self.report(session, status, reason, message, False)
        self.send_aborts(session)

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

    def refuse(self, rid: str, params: TransferParams, message: str, attempt: tuple[str, int]) -> None:
        """Tell the prefill side of a request that was given up before its prefill rank was known."""
        now, key = self._worker.loop.time(), -attempt[1]
        session = DecodeSession(key, rid, params, _NO_PAGES, 0, 0, *attempt, now, now, State.FAILED)
        session.why = message
        if params.room not in self._table.rooms:
            self._table.quarantine(session)
            self._worker.spawn(self._tell_refusal(session))

    async def _tell_refusal(self, session: DecodeSession) -> None:
        worker = self._worker
        try:
            if self.directory is None:
                return
            # One of its ranks tells the others; several would hear of it at different times.
            found, *_ = await self.directory.find(session.params, 0.0, must_fit=False)
            address = found.address
            link = worker.link_to(address.rank_ip, address.rank_port, address.instance or "")
            link.begin(session.key, worker.loop.time())
            session.sources.append(PrefillSource(found.rank.rank, link, False, None))
            self.send_aborts(session)
        except (HandshakeError, OSError) as error:
            logger.warning("%s does not hear that its request %s was given up: %s", session.peer, session.rid, error)
        finally:
            if not session.sources:
                self._table.forget(session)

    def send_aborts(self, session: DecodeSession) -> None:
        """Ask the prefill ranks to write no more, and to say when it is so."""
        for source in session.sources:
            if not source.is_drained:
                self._send_abort(session, source)

    def _send_abort(self, session: DecodeSession, source: PrefillSource) -> None:
        worker = self._worker
        source.request_sent = worker.loop.time()
        who = (session.params.room, worker.place.host, worker.port, session.generation, worker.instance)
        source.link.send(wire.Abort(*who, session.why[:1000], source.link.instance, session.group).frames())

    def look_after(self, now: float) -> None:
        """Sessions in quarantine: send aborts again, and shut out prefill ranks whose hosts have vanished."""
        worker = self._worker
        over = [(session, source) for session in self._table.over.values() for source in session.sources]
        lost = [pair for pair in over if pair[1].link.is_lost and pair[1].fence is None and not pair[1].is_drained]
        for link in {source.link for _, source in lost}:
            self._shut_out(link, [pair for pair in lost if pair[1].link is link], now)
        for session, source in over:
            if source.is_drained:
                continue
            if source.fence is not None and source.fence.quiesced:
                self._drain(session, source)
            elif now - source.request_sent > worker.options.resend:
                worker.counts["retries"] += 1
                self._send_abort(session, source)

    def _shut_out(self, link: Link, waiting: list[tuple[DecodeSession, PrefillSource]], now: float) -> None:
        worker = self._worker
        fence = worker.transport.fence(link.instance) if link.instance else None
        if fence is not None:
            # It is told of the pool again before it gets another request, and then may write again.
            self._table.registered.discard(link.instance)
            for _, source in waiting:
                source.fence = fence
            return
        for session, source in waiting:
            if now > worker.options.quarantine_timeout + max(session.over_since, link.last_word):
                logger.warning(
                    "%s was not heard for %.0f s: the pages of request %s are used again, though it was never "
                    "confirmed that nothing is written into them",
                    session.peer,
                    now - link.last_word,
                    session.rid,
                )
                self._drain(session, source)

    def drained(self, ack: wire.AbortAck) -> None:
        """A prefill rank writes no more."""
        session = self._table.generations.get(ack.generation)
        source = session.source(ack.rank) if session is not None and session.params.room == ack.room else None
        if session is not None and source is not None and not self.is_replaced(source, ack.instance):
            self._drain(session, source)

    def is_replaced(self, source: PrefillSource, instance: str) -> bool:
        """Another process answers at the address of a session's prefill rank, which is gone therefore."""
        if source.link.instance in ("", instance):
            return False
        self._worker.bury(source.link)
        return True

    def peer_gone(self, link: Link) -> None:
        """A prefill rank's process has ended; its last bytes arrive within moments, or never."""
        self._worker.loop.call_later(self._worker.options.gone_grace, self._drain_all, link)

    def _drain_all(self, link: Link) -> None:
        for session in list(self._table.over.values()):
            for source in session.sources:
                if source.link is link:
                    self._drain(session, source)

    def _drain(self, session: DecodeSession, source: PrefillSource) -> None:
        if session.key not in self._table.over:
            return
        source.is_drained = True
        if session.is_drained:
            self._rest(session)

    def _rest(self, session: DecodeSession) -> None:
        self._table.forget(session)
        if session.key >= 0:
            self._worker.emit(KVQuiesced(session.key))
