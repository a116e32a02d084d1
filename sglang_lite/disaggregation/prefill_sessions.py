"""Sessions of the side that computes prompts: waits for decode servers, sends pages, hands over the first token."""

from __future__ import annotations

import collections

import numpy as np

from sglang_lite.disaggregation import frames as wire
from sglang_lite.disaggregation.base import FAKE_HOST, FirstToken, KVFailed, KVQuiesced, KVSent, PeerReady, SessionStats
from sglang_lite.disaggregation.decode_peers import DecodePeers
from sglang_lite.disaggregation.links import Link
from sglang_lite.disaggregation.options import SessionOptions
from sglang_lite.disaggregation.pool_memory import PoolMemory
from sglang_lite.disaggregation.prefill_delivery import Delivery
from sglang_lite.disaggregation.prefill_endings import PrefillEndings
from sglang_lite.disaggregation.prefill_state import Destination, PrefillSession
from sglang_lite.disaggregation.prefill_table import PrefillTable
from sglang_lite.disaggregation.registration import Bootstrap, Registration
from sglang_lite.disaggregation.states import State, advance
from sglang_lite.disaggregation.waiting_rooms import REOPEN_SECONDS, WaitingRooms
from sglang_lite.disaggregation.worker import Place, SessionWorker
from sglang_lite.transfer.base import KVTransport
from sglang_lite.types import Int32Array, TransferParams


class PrefillWorker(SessionWorker):
    """See ``base.PrefillSessions``.

    Args:
        bootstrap: host and port of the bootstrap server to register with; None for none.
        http_port: of this server, for peers.
        load_balance_method: how requests find their replica.
    """

    name = "prefill sessions"

    def __init__(
        self,
        place: Place,
        memory: PoolMemory,
        transport: KVTransport,
        options: SessionOptions,
        bootstrap: tuple[str, int] | None,
        http_port: int | None = None,
        load_balance_method: str = "follow_bootstrap_room",
    ) -> None:
        super().__init__(place, memory, transport, options)
        self._bootstrap = None if bootstrap is None else Bootstrap(*bootstrap, http_port, load_balance_method)
        self._registration: Registration | None = None
        self._fake: set[int] = set()
        self._peers = DecodePeers(self)
        self._waiting = WaitingRooms(options.bootstrap_timeout)
        self._table = PrefillTable()
        self._endings = PrefillEndings(self, self._table, self._waiting)
        self._delivery = Delivery(self, self._table, self._endings)

    @property
    def is_registered(self) -> bool:
        """The bootstrap server knows this rank."""
        return self._registration is not None and self._registration.is_done

    # From the core's thread.

    def open(self, key: int, rid: str, params: TransferParams, num_tokens: int) -> None:
        """See ``base.PrefillSessions``."""
        self.call(self._open, key, rid, params, num_tokens)

    def refuse(self, rid: str, params: TransferParams, message: str) -> None:
        """See ``base.PrefillSessions``."""
        self.call(self._refuse, rid, params, message)

    def send(self, key: int, first_page: int, pages: Int32Array, last: FirstToken | None = None) -> None:
        """See ``base.PrefillSessions``."""
        self.call(self._send, key, first_page, np.array(pages, dtype=np.int32), last)

    def stats(self) -> SessionStats:
        """See ``base.Sessions``."""
        live = list(self._table.keys.values())
        states = collections.Counter(session.state.name.lower() for session in live)
        pending = tuple(name for session in live for name in list(session.spans))
        count = self.counts
        return SessionStats(
            by_state=dict(states),
            quarantined=len(self._table.over),
            bytes=count["bytes"],
            spans=count["spans"],
            transfers=count["transfers"],
            seconds=self.seconds,
            retries=count["retries"],
            failures=dict(self.failures),
            distributions=self.distributions.copy(),
            completed_checksums=tuple(self._delivery.completed),
            pending_checksums=pending,
            completed=count["completed"],
            pending=len(pending),
        )

    # On the loop.

    def _open(self, key: int, rid: str, params: TransferParams, num_tokens: int) -> None:
        now = self.loop.time()
        if params.host == FAKE_HOST:
            self._fake.add(key)
            self.emit(PeerReady(key))
            return
        if params.room in self._table.rooms:
            self.failures["duplicate"] += 1
            message = f"bootstrap room {params.room} is in use by another request; rooms are used by one at a time"
            self.emit(KVFailed(key, 400, message, True, "duplicate"))
            return
        session = PrefillSession(key, rid, params, num_tokens, now, now + self.options.bootstrap_timeout)
        self._table.open(session)
        if self.place.dp_size > 1 and self._registration is not None:
            self.spawn(self._registration.tell_room(params.room))
        early, aborted = self._waiting.open(params.room, now)
        if aborted:
            # Perhaps the room is used again, then the pages are on their way; else nobody will send any.
            session.why_late = f"the decode server ended it before: {aborted}"
            session.deadline = now + REOPEN_SECONDS
        for request in early:
            self._add(session, request)

    def _refuse(self, rid: str, params: TransferParams, message: str) -> None:
        if params.host != FAKE_HOST and params.room not in self._table.rooms:
            self._waiting.refuse(params.room, f"request {rid}: {message}", self.loop.time())

    def _send(self, key: int, first_page: int, pages: Int32Array, last: FirstToken | None) -> None:
        if key in self._fake:
            if last is not None:
                self._fake.discard(key)
                self.emit(KVSent(key))
            return
        session = self._table.keys.get(key)
        if session is None:
            return  # it failed, and the core will hear of it, or has
        if first_page != session.next_page:
            self._endings.fail(session, 500, "engine", f"pages from {first_page} follow page {session.next_page}")
            return
        session.next_page += len(pages)
        session.last = last
        if session.is_ready:
            self._delivery.submit(session, first_page, pages)
        else:
            session.waiting.append((first_page, pages))
            if last is not None:
                session.deadline = min(session.deadline, self.loop.time() + self.options.metadata_wait)
        self.arm_poll()

    def on_abort(self, key: int) -> None:
        """See ``SessionWorker``."""
        self._fake.discard(key)
        session = self._table.keys.get(key)
        if session is not None:
            self._endings.fail(session, 0, "aborted", "the prefill side gave the request up")
        elif key not in self._table.over:
            self.emit(KVQuiesced(key))

    def on_message(self, frames: list[bytes]) -> None:
        """See ``SessionWorker``."""
        message = wire.decode_for_prefill(frames)
        match message:
            case wire.Register():
                self._peers.register(message)
                return
            case wire.Request() | wire.Abort() | wire.AuxAck() | wire.Alive():
                link = self.links.heard(message.instance, self.loop.time())
                if isinstance(message, wire.Alive) and link is not None and not link.users:
                    # Its request may wait for a room that nobody has opened here yet: it must know that we live.
                    link.send(wire.Alive(self.instance).frames())
            case _:
                return
        match message:
            case wire.Request():
                self._request(message)
            case wire.Abort():
                self._endings.peer_aborts(message)
            case wire.AuxAck():
                self._delivery.confirmed(message)
            case _:
                pass

    def _request(self, request: wire.Request) -> None:
        name = (request.instance, request.room, request.generation)
        if request.instance not in self._peers:
            self._answer_unknown(request)
            return
        if request.pages is not None and len(request.pages) > self.memory.num_pages:
            why = f"{len(request.pages)} pages are more than the {self.memory.num_pages} that a prompt can have here"
            self._endings.answer(request, State.FAILED, "handshake", why)
            return
        end = self._table.finished.get(name)
        if end is State.FAILED:
            self._endings.answer(request, end, "peer_failed", "this session has ended")
        if end is not None or self._table.find(name) is not None:
            return  # it was sent again, or comes late
        if self._table.attempts.get(request.attempt) is not None:
            self._endings.answer(request, State.FAILED, "peer_failed", "another rank has ended this session")
            return
        session = self._table.rooms.get(request.room)
        if session is not None:
            self._add(session, request)
            return
        self._waiting.put(name, request, self.loop.time())
        self._endings.answer(request, State.BOOTSTRAPPING)

    def _answer_unknown(self, request: wire.Request) -> None:
        refused = self._peers.why_refused(request.instance)
        code, why = ("handshake", refused) if refused else (wire.UNREGISTERED, "this decode server is not known")
        self._endings.answer(request, State.FAILED, code, why)

    def _add(self, session: PrefillSession, request: wire.Request) -> None:
        if session.is_ready:
            why = f"bootstrap room {request.room} is in use by another request"
            self._endings.answer(request, State.FAILED, "duplicate", why)
            return
        peer = self._peers.get(request.instance)
        if peer is None:
            self._answer_unknown(request)
            return
        session.required = request.required
        self._table.add(session, Destination(request, peer))
        wrong = self._misfit(session, request)
        if wrong:
            self._endings.fail(session, 500, "handshake", wrong)
            return
        if len(session.destinations) < session.required:
            self._endings.answer(request, State.BOOTSTRAPPING)
            return
        session.state = advance(session.state, State.WAITING_FOR_INPUT)
        session.deadline = float("inf")
        for other in session.destinations:
            self._endings.answer(other.request, session.state)
        self.distributions.observe("kv_transfer_bootstrap_ms", (self.loop.time() - session.opened) * 1e3)
        self.emit(PeerReady(session.key, min(other.request.prefix_len for other in session.destinations)))
        waiting, session.waiting = session.waiting, []
        for first_page, pages in waiting:
            self._delivery.submit(session, first_page, pages)
        self.arm_poll()

    def _misfit(self, session: PrefillSession, request: wire.Request) -> str:
        size = self.memory.page_size
        if request.prefix_len % size or request.prefix_len > session.num_tokens:
            return f"a decode prefix of {request.prefix_len} tokens is no whole number of pages of {size}"
        wanted = -(-session.num_tokens // size) - request.prefix_len // size
        if request.pages is not None and len(request.pages) != wanted:
            return f"the decode server gives {len(request.pages)} pages where {session.num_tokens} tokens need {wanted}"
        return ""

    def on_poll(self, now: float) -> bool:
        """See ``SessionWorker``."""
        is_busy = self._delivery.look_after(now)
        return self._endings.drain(now) or is_busy

    def on_tick(self, now: float) -> None:
        """See ``SessionWorker``."""
        for session in list(self._table.keys.values()):
            if now > session.deadline:
                waited = now - session.opened
                why = session.why_late or f"no decode server sent its pages within {waited:.1f} s"
                self._endings.fail(session, 500, "peer_aborted" if session.why_late else "timeout", why)
            elif session.aux_sent and now - session.aux_sent > self.options.resend:
                self.counts["retries"] += 1
                self._delivery.send_record(session, now)
        for name, request, why in self._waiting.expire(now):
            self._table.note(name, request.attempt, State.FAILED)
            self._endings.answer(request, State.FAILED, "peer_failed", why)

    def on_lost(self, link: Link, is_gone: bool) -> None:
        """See ``SessionWorker``."""
        why = "its process is gone" if is_gone else "it does not answer"
        for session in list(self._table.keys.values()):
            if session.key in link.users:
                message = f"lost connection with decode instance {link.address}: {why}"
                self._endings.fail(session, 500, "peer_lost", message)
        if is_gone and self._peers.remove(link.instance):
            self.arm_poll()

    def on_start(self) -> None:
        """See ``SessionWorker``."""
        if self._bootstrap is not None:
            self._registration = Registration(self, self._bootstrap)
            self.spawn(self._registration.register())

    def on_stop(self) -> None:
        """See ``SessionWorker``."""
        for session in list(self._table.keys.values()):
            self._endings.fail(session, 503, "closed", "the prefill server is shutting down")

    async def on_finish(self) -> None:
        """See ``SessionWorker``."""
        if self._registration is not None:
            await self._registration.close()
