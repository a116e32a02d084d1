"""Sessions of the side that computes prompts: waits for decode servers, sends pages, hands over the first token."""

from __future__ import annotations

import collections
import logging

import numpy as np

from sglang_lite.disaggregation import frames as wire
from sglang_lite.disaggregation.base import (
    FAKE_HOST,
    FirstToken,
    KVFailed,
    KVQuiesced,
    KVSent,
    PeerReady,
    SessionStats,
)
from sglang_lite.disaggregation.bootstrap_client import BootstrapClient, HandshakeError
from sglang_lite.disaggregation.descriptor import span_of_pages
from sglang_lite.disaggregation.links import Link
from sglang_lite.disaggregation.options import SessionOptions
from sglang_lite.disaggregation.page_sender import PageSender
from sglang_lite.disaggregation.pool_memory import PoolMemory
from sglang_lite.disaggregation.prefill_state import DecodePeer, Destination, PrefillSession
from sglang_lite.disaggregation.recent import Recent
from sglang_lite.disaggregation.states import State, advance
from sglang_lite.disaggregation.waiting_rooms import REOPEN_SECONDS, WaitingRooms
from sglang_lite.disaggregation.worker import Place, SessionWorker, describe_rank
from sglang_lite.transfer.base import KVTransport, TransferError
from sglang_lite.types import Int32Array, TransferParams

logger = logging.getLogger(__name__)

MOST_EARLY = 1 << 14
MOST_PEERS = 1 << 12
UNREGISTERED = "unregistered"
"""Code of a status: this process does not know the decode rank; it should register again."""


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
        self._bootstrap, self._http_port, self._balance = bootstrap, http_port, load_balance_method
        self._client: BootstrapClient | None = None
        self._peers: dict[str, DecodePeer] = {}
        self._rooms: dict[int, PrefillSession] = {}
        self._keys: dict[int, PrefillSession] = {}
        self._over: dict[int, PrefillSession] = {}
        self._fake: set[int] = set()
        self._refused: Recent[str, str] = Recent(MOST_PEERS)
        self._waiting = WaitingRooms(options.bootstrap_timeout)
        self._names: dict[tuple[str, int, int], tuple[PrefillSession, Destination]] = {}
        self._finished: Recent[tuple[str, int, int], State] = Recent(MOST_EARLY)
        self._completed: collections.deque[str] = collections.deque(maxlen=256)
        self._sender = PageSender(self)
        self.is_registered = False

    # From the core's thread.

    def open(self, key: int, rid: str, params: TransferParams, num_tokens: int) -> None:
        """See ``base.PrefillSessions``."""
        self.call(self._open, key, rid, params, num_tokens)

    def send(self, key: int, first_page: int, pages: Int32Array, last: FirstToken | None = None) -> None:
        """See ``base.PrefillSessions``."""
        self.call(self._send, key, first_page, np.array(pages, dtype=np.int32), last)

    def abort(self, key: int) -> None:
        """See ``base.Sessions``."""
        self.call(self._abort, key)

    def stats(self) -> SessionStats:
        """See ``base.Sessions``."""
        live = list(self._keys.values())
        states = collections.Counter(session.state.name.lower() for session in live)
        pending = tuple(name for session in live for name in list(session.spans))
        count = self.counts
        return SessionStats(
            by_state=dict(states),
            quarantined=len(self._over),
            bytes=count["bytes"],
            spans=count["spans"],
            transfers=count["transfers"],
            seconds=self.seconds,
            retries=count["retries"],
            failures=dict(self.failures),
            completed_checksums=tuple(self._completed),
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
        if params.room in self._rooms:
            self.failures["duplicate"] += 1
            message = f"bootstrap room {params.room} is in use by another request; rooms are used by one at a time"
            self.emit(KVFailed(key, 400, message, True, "duplicate"))
            return
        session = PrefillSession(key, rid, params, num_tokens, now, now + self.options.bootstrap_timeout)
        self._rooms[params.room] = self._keys[key] = session
        if self.place.dp_size > 1 and self._client is not None:
            self.spawn(self._tell_room(session))
        early, aborted = self._waiting.open(params.room, now)
        if aborted:
            # Perhaps the room is used again, then the pages are on their way; else nobody will send any.
            session.why_late = f"the decode server ended it before: {aborted}"
            session.deadline = now + REOPEN_SECONDS
        for request in early:
            self._add(session, request)

    async def _tell_room(self, session: PrefillSession) -> None:
        if self._client is None or self._bootstrap is None:
            return
        try:
            await self._client.tell_room(*self._bootstrap, session.params.room, self.place.dp_rank)
        except HandshakeError as error:
            logger.warning("room %d is not known to the bootstrap server: %s", session.params.room, error)

    def _send(self, key: int, first_page: int, pages: Int32Array, last: FirstToken | None) -> None:
        if key in self._fake:
            if last is not None:
                self._fake.discard(key)
                self.emit(KVSent(key))
            return
        session = self._keys.get(key)
        if session is None:
            return  # it failed, and the core will hear of it, or has
        if first_page != session.next_page:
            self._fail(session, 500, "engine", f"pages from {first_page} follow page {session.next_page}")
            return
        session.next_page += len(pages)
        session.last = last
        if session.is_ready:
            self._submit(session, first_page, pages)
        else:
            session.waiting.append((first_page, pages))
            if last is not None:
                session.deadline = min(session.deadline, self.loop.time() + self.options.metadata_wait)
        self.arm_poll()

    def _abort(self, key: int) -> None:
        self._fake.discard(key)
        session = self._keys.get(key)
        if session is not None:
            self._fail(session, 0, "aborted", "the prefill side gave the request up")
        elif key not in self._over:
            self.emit(KVQuiesced(key))

    def on_message(self, frames: list[bytes]) -> None:
        """See ``SessionWorker``."""
        message = wire.decode_for_prefill(frames)
        match message:
            case wire.Register():
                self._register(message)
            case wire.Request():
                self._request(message)
            case wire.Abort():
                self._peer_aborts(message)
            case wire.AuxAck():
                self._confirmed(message)
            case wire.Alive():
                self.links.heard(message.instance, self.loop.time())
            case _:
                pass

    def _register(self, told: wire.Register) -> None:
        try:
            peer = self.transport.connect(told.description)
            fitting = [region for region in peer.regions if region.length % self.memory.page_bytes == 0]
            if told.page_bytes != self.memory.page_bytes or not fitting:
                raise TransferError(
                    "rejected", f"its pages have {told.page_bytes} bytes, ours {self.memory.page_bytes}"
                )
            link = self.link_to(told.ip, told.port, told.instance)
        except (TransferError, OSError) as error:
            logger.warning("decode server %s:%d cannot be served: %s", told.ip, told.port, error)
            self._refused.put(told.instance, str(error))
            return
        self._refused.pop(told.instance)
        if told.instance not in self._peers and len(self._peers) >= MOST_PEERS:
            self._forget_unused_peer()
        self._peers[told.instance] = DecodePeer(told, link, peer, fitting[0])

    def _forget_unused_peer(self) -> None:
        for instance, peer in self._peers.items():
            if not peer.link.users:
                self.transport.disconnect(peer.peer)
                del self._peers[instance]
                return

    def _request(self, request: wire.Request) -> None:
        name = (request.instance, request.room, request.generation)
        now = self.loop.time()
        self.links.heard(request.instance, now)
        if request.instance not in self._peers:
            refused = self._refused.get(request.instance)
            code, why = ("handshake", refused) if refused else (UNREGISTERED, "this decode server is not known")
            self._answer(request, State.FAILED, code, why)
            return
        if name in self._names or self._finished.get(name) is not None:
            return  # it was sent again, or comes late
        session = self._rooms.get(request.room)
        if session is not None:
            self._add(session, request)
            return
        self._waiting.put(name, request, now)
        self._answer(request, State.BOOTSTRAPPING)

    def _add(self, session: PrefillSession, request: wire.Request) -> None:
        if session.is_ready:
            self._answer(
                request, State.FAILED, "duplicate", f"bootstrap room {request.room} is in use by another request"
            )
            return
        peer = self._peers.get(request.instance)
        if peer is None:
            self._answer(request, State.FAILED, UNREGISTERED, "the prefill server does not know this decode server")
            return
        destination = Destination(request, peer)
        session.destinations.append(destination)
        session.required = request.required
        self._names[destination.name] = (session, destination)
        peer.link.users.add(session.key)
        wrong = self._misfit(session, request)
        if wrong:
            self._fail(session, 500, "handshake", wrong)
            return
        if len(session.destinations) < session.required:
            self._answer(request, State.BOOTSTRAPPING)
            return
        session.state = advance(session.state, State.WAITING_FOR_INPUT)
        session.deadline = float("inf")
        for other in session.destinations:
            self._answer(other.request, session.state)
        self.emit(PeerReady(session.key, min(other.request.prefix_len for other in session.destinations)))
        waiting, session.waiting = session.waiting, []
        for first_page, pages in waiting:
            self._submit(session, first_page, pages)
        self.arm_poll()

    def _misfit(self, session: PrefillSession, request: wire.Request) -> str:
        size = self.memory.page_size
        if request.prefix_len % size or request.prefix_len > session.num_tokens:
            return f"a decode prefix of {request.prefix_len} tokens is no whole number of pages of {size}"
        wanted = -(-session.num_tokens // size) - request.prefix_len // size
        if request.pages is not None and len(request.pages) != wanted:
            return f"the decode server gives {len(request.pages)} pages where {session.num_tokens} tokens need {wanted}"
        return ""

    def _submit(self, session: PrefillSession, first_page: int, pages: Int32Array) -> None:
        """One span a page, to every destination that wants it."""
        if session.state.is_over or not len(pages):
            return
        if session.state is not State.TRANSFERRING:
            session.state = advance(session.state, State.TRANSFERRING)
            for destination in session.destinations:
                self._answer(destination.request, session.state)
        size = self.memory.page_size
        stop = min((first_page + len(pages)) * size, session.num_tokens)
        span = span_of_pages(session.rid, session.params, first_page, pages, stop, size)
        session.spans.append(span.checksum())
        for destination in session.destinations:
            try:
                self._sender.submit(session, destination, first_page, pages)
            except TransferError as error:
                self._fail(session, 500, error.reason, f"pages cannot be sent: {error}")
                return

    def on_poll(self, now: float) -> bool:
        """See ``SessionWorker``."""
        busy = False
        for session in list(self._keys.values()):
            if session.state is State.TRANSFERRING or session.last is not None:
                busy |= self._look_after(session, now)
        for session in list(self._over.values()):
            self._drain(session)
        return busy or bool(self._over)

    def _look_after(self, session: PrefillSession, now: float) -> bool:
        """True while transfers are under way."""
        failed = session.first_failed()
        if failed is not None:
            self._fail(session, 500, failed.reason or "engine", f"the transfer failed: {failed.detail}")
            return False
        if not session.is_delivered:
            return session.is_ready
        if session.aux_sent == 0.0:
            self._send_aux(session, now)
        return False

    def _send_aux(self, session: PrefillSession, now: float) -> None:
        session.aux_sent = now
        first = session.last
        if first is None:
            return
        for destination in session.destinations:
            if not destination.is_confirmed:
                record = destination.record(first, self.memory.page_bytes)
                name = (session.params.room, self.place.tp_rank, destination.request.generation, self.instance)
                destination.decode.link.send(wire.Aux(*name, record).frames())

    def _confirmed(self, ack: wire.AuxAck) -> None:
        found = self._names.get((ack.instance, ack.room, ack.generation))
        self.links.heard(ack.instance, self.loop.time())
        if found is None or found[0].state.is_over or not found[0].aux_sent:
            return
        session, destination = found
        if ack.message:
            self._fail(session, 500, "peer_failed", f"the decode server refuses the KV: {ack.message}")
            return
        destination.is_confirmed = True
        if all(other.is_confirmed for other in session.destinations):
            self._succeed(session)

    def _succeed(self, session: PrefillSession) -> None:
        session.state = advance(session.state, State.SUCCESS)
        self.seconds += self.loop.time() - session.opened
        self.counts["transfers"] += 1
        self.counts["completed"] += len(session.spans)
        self._completed.extend(session.spans)
        self.counts["bytes"] += sum(other.num_pages for other in session.destinations) * self.memory.page_bytes
        for destination in session.destinations:
            self._answer(destination.request, State.SUCCESS)
        self._leave(session)
        self._forget(session)
        self.emit(KVSent(session.key))

    def _fail(self, session: PrefillSession, status: int, reason: str, message: str) -> None:
        """End it; status 0 when the core itself wanted that."""
        session.state = State.FAILED
        self.failures[reason] += 1
        text = f"KV transfer failed for room {session.params.room} to {session.peers}: {message}"
        logger.warning("prefill session of request %s at %s:%d: %s", session.rid, self.place.host, self.port, text)
        self._leave(session)
        self._waiting.note_failed(session.params.room, message, self.loop.time())
        for destination in session.destinations:
            for transfer in destination.transfers:
                transfer.abort()
            self._answer(destination.request, State.FAILED, reason, message)
        quiesced = session.is_quiesced
        if status:
            self.emit(KVFailed(session.key, status, text, quiesced, reason))
        if quiesced:
            self._rest(session)
            if not status:
                self.emit(KVQuiesced(session.key))
        else:
            self._over[session.key] = session
            self.arm_poll()

    def _drain(self, session: PrefillSession) -> None:
        for destination in session.destinations:
            if destination.wants_drained and destination.is_quiesced:
                self._answer_drained(destination)
        if session.is_quiesced:
            del self._over[session.key]
            self._rest(session)
            self.emit(KVQuiesced(session.key))

    def _rest(self, session: PrefillSession) -> None:
        for destination in session.destinations:
            self._answer_drained(destination)
        self._forget(session)

    def _answer_drained(self, destination: Destination) -> None:
        destination.wants_drained = False
        request = destination.request
        ack = wire.AbortAck(request.room, self.place.tp_rank, request.generation, self.instance)
        destination.decode.link.send(ack.frames())

    def _leave(self, session: PrefillSession) -> None:
        self._keys.pop(session.key, None)
        self._rooms.pop(session.params.room, None)

    def _forget(self, session: PrefillSession) -> None:
        for destination in session.destinations:
            self._names.pop(destination.name, None)
            self._finished.put(destination.name, session.state)
            destination.decode.link.users.discard(session.key)

    def _peer_aborts(self, abort: wire.Abort) -> None:
        name = (abort.instance, abort.room, abort.generation)
        self.links.heard(abort.instance, self.loop.time())
        found = self._names.get(name)
        if found is None:
            # Nothing was, or will be, written for this generation.
            self._waiting.drop(name)
            is_news = self._finished.get(name) is None
            self._finished.put(name, State.FAILED)
            try:
                link = self.link_to(abort.ip, abort.port, abort.instance)
            except OSError as error:
                logger.warning("cannot answer an abort: %s", error)
                return
            link.send(wire.AbortAck(abort.room, self.place.tp_rank, abort.generation, self.instance).frames())
            if abort.target not in ("", self.instance):
                return
            session = self._rooms.get(abort.room)
            why = f"{abort.message or 'aborted'} (decode server {abort.ip}:{abort.port})"
            if session is None and is_news:
                self._waiting.note_aborted(abort.room, why, self.loop.time())
            elif session is not None and is_news and not session.destinations:
                self._fail(session, 500, "peer_aborted", f"the decode side ended it: {why}")
            return
        session, destination = found
        destination.wants_drained = True
        if not session.state.is_over:
            self._fail(session, 500, "peer_aborted", f"the decode side ended it: {abort.message or 'aborted'}")
        elif destination.is_quiesced:
            self._answer_drained(destination)

    def on_tick(self, now: float) -> None:
        """See ``SessionWorker``."""
        for session in list(self._keys.values()):
            if now > session.deadline:
                waited = now - session.opened
                why = session.why_late or f"no decode server sent its pages within {waited:.1f} s"
                self._fail(session, 500, "peer_aborted" if session.why_late else "timeout", why)
            elif session.aux_sent and now - session.aux_sent > self.options.resend:
                self.counts["retries"] += 1
                self._send_aux(session, now)
        for name, request, why in self._waiting.expire(now):
            self._finished.put(name, State.FAILED)
            self._answer(request, State.FAILED, "peer_failed", why)

    def on_lost(self, link: Link, is_gone: bool) -> None:
        """See ``SessionWorker``."""
        why = "its process is gone" if is_gone else "it does not answer"
        for session in list(self._keys.values()):
            if session.key in link.users:
                self._fail(session, 500, "peer_lost", f"lost connection with decode instance {link.address}: {why}")
        peer = self._peers.get(link.instance)
        if is_gone and peer is not None:
            del self._peers[link.instance]
            self.transport.disconnect(peer.peer)
            self.arm_poll()

    def _answer(self, request: wire.Request, state: State, code: str = "", message: str = "") -> None:
        try:
            link = self.link_to(request.ip, request.port, request.instance)
        except OSError as error:
            logger.warning("cannot answer decode server %s:%d: %s", request.ip, request.port, error)
            return
        status = wire.Status(
            request.room, state, self.place.tp_rank, request.generation, self.instance, code, message[:1000]
        )
        link.send(status.frames())

    def on_start(self) -> None:
        """See ``SessionWorker``."""
        if self._bootstrap is not None:
            self.spawn(self._register_here())

    async def _register_here(self) -> None:
        if self._bootstrap is None:
            return
        self._client = BootstrapClient()
        rank = describe_rank(self.place, self.port, self.memory, self.instance, self._balance, self._http_port)
        try:
            await self._client.register(*self._bootstrap, rank)
            self.is_registered = True
        except HandshakeError as error:
            logger.error("decode servers will not find this prefill server: %s", error)

    def on_stop(self) -> None:
        """See ``SessionWorker``."""
        for session in list(self._keys.values()):
            self._fail(session, 503, "closed", "the prefill server is shutting down")

    async def on_finish(self) -> None:
        """See ``SessionWorker``."""
        if self._client is not None:
            await self._client.close()
