"""Sessions of the side that generates: finds the prefill server, offers pages, takes KV and first token."""

from __future__ import annotations

import collections

import numpy as np

from sglang_lite.disaggregation import frames as wire
from sglang_lite.disaggregation.base import (
    FAKE_HOST,
    FirstToken,
    KVArrived,
    KVFailed,
    KVQuiesced,
    PrefillLost,
    SessionStats,
)
from sglang_lite.disaggregation.bootstrap_client import BootstrapClient, HandshakeError
from sglang_lite.disaggregation.decode_arrival import Arrival
from sglang_lite.disaggregation.decode_endings import DecodeEndings
from sglang_lite.disaggregation.decode_state import DecodeSession, PrefillSource
from sglang_lite.disaggregation.decode_table import DecodeTable
from sglang_lite.disaggregation.links import Link
from sglang_lite.disaggregation.options import SessionOptions
from sglang_lite.disaggregation.pairing import PairingError
from sglang_lite.disaggregation.pool_memory import PoolMemory
from sglang_lite.disaggregation.prefill_directory import Found, PrefillDirectory, PrefillServer
from sglang_lite.disaggregation.server_watch import ServerWatch
from sglang_lite.disaggregation.states import State, advance
from sglang_lite.disaggregation.worker import Place, SessionWorker
from sglang_lite.transfer.base import KVTransport
from sglang_lite.types import Int32Array, TransferParams

MOST_RETRIES = 3
"""Times that a session registers again with a prefill rank that does not know this process."""


class DecodeWorker(SessionWorker):
    """See ``base.DecodeSessions``."""

    name = "decode sessions"

    def __init__(self, place: Place, memory: PoolMemory, transport: KVTransport, options: SessionOptions) -> None:
        super().__init__(place, memory, transport, options)
        self._client: BootstrapClient | None = None
        self._directory: PrefillDirectory | None = None
        self._table = DecodeTable(options.max_sockets)
        self._endings = DecodeEndings(self, self._table)
        self._arrival = Arrival(self, self._table, self._endings)

    # From the core's thread.

    def open(
        self,
        key: int,
        rid: str,
        params: TransferParams,
        pages: Int32Array,
        num_tokens: int,
        decode_prefix_len: int,
        attempt: tuple[str, int] | None = None,
    ) -> None:
        """See ``base.DecodeSessions``.

        Args:
            attempt: what ``next_attempt`` of the first rank said, where there are several.
        """
        where = np.array(pages, dtype=np.int32)
        attempt = self.next_attempt() if attempt is None else attempt
        self.call(self._open, key, rid, params, where, num_tokens, decode_prefix_len, attempt)

    def next_attempt(self) -> tuple[str, int]:
        """A group and a generation of it that no session had. Any thread may call it."""
        return self.instance, self._table.next_generation()

    def refuse(self, rid: str, params: TransferParams, message: str) -> None:
        """See ``base.DecodeSessions``."""
        self.call(self._refuse, rid, params, message)

    def stats(self) -> SessionStats:
        """See ``base.Sessions``."""
        count = self.counts
        return SessionStats(
            by_state=dict(
                collections.Counter(session.state.name.lower() for session in list(self._table.keys.values()))
            ),
            quarantined=sum(key >= 0 for key in list(self._table.over)),
            bytes=count["bytes"],
            spans=count["spans"],
            transfers=count["transfers"],
            seconds=self.seconds,
            retries=count["retries"],
            failures=dict(self.failures),
            distributions=self.distributions.copy(),
            completed=count["transfers"],
            pending=len(self._table.keys),
        )

    # On the loop.

    def _open(
        self,
        key: int,
        rid: str,
        params: TransferParams,
        pages: Int32Array,
        num_tokens: int,
        prefix_len: int,
        attempt: tuple[str, int],
    ) -> None:
        if params.host == FAKE_HOST:
            self.emit(KVArrived(key, FirstToken(0)))
            return
        if params.room in self._table.rooms:
            self.failures["duplicate"] += 1
            message = f"bootstrap room {params.room} is in use by another request; rooms are used by one at a time"
            self.emit(KVFailed(key, 400, message, True, "duplicate"))
            return
        now = self.loop.time()
        until = now + self.options.bootstrap_timeout
        session = DecodeSession(key, rid, params, pages, num_tokens, prefix_len, *attempt, now, until)
        self._table.open(session)
        session.task = self.spawn(self._handshake(session))

    async def _handshake(self, session: DecodeSession) -> None:
        if self._directory is None:
            return
        try:
            found = await self._directory.find(session.params, self.options.bootstrap_timeout)
            if session.state.is_over:
                return
            now = self.loop.time()
            sources = [self._source(session, rank) for rank in found]
        except (HandshakeError, PairingError, OSError) as error:
            if not session.state.is_over:
                self._directory.forget(session.params.host, session.params.port)
                self._endings.fail(session, 500, "handshake", f"Decode handshake failed: {error}")
            return
        session.sources = sources
        session.state = advance(session.state, State.WAITING_FOR_INPUT)
        self.distributions.observe("kv_transfer_bootstrap_ms", (self.loop.time() - session.opened) * 1e3)
        session.deadline = now + self.options.waiting_timeout
        for source in sources:
            source.link.begin(session.key, now)
            if source.link.instance not in self._table.registered:
                self._register(source.link)
            self._send_request(session, source, now)

    def _source(self, session: DecodeSession, found: Found) -> PrefillSource:
        rank, address = found.rank, found.address
        link = self.link_to(address.rank_ip, address.rank_port, address.instance or "")
        share = self.memory.share_with(rank.rank, found.tp_size) if rank.sends else None
        return PrefillSource(rank.rank, link, rank.sends, share, found.num_decode_ranks)

    def _refuse(self, rid: str, params: TransferParams, message: str) -> None:
        if params.host != FAKE_HOST:
            self._endings.refuse(rid, params, message, self.next_attempt())

    def _register(self, link: Link) -> None:
        place, memory = self.place, self.memory
        told = wire.Register(
            place.host,
            self.port,
            self.instance,
            (memory.addr,),
            place.tp_rank,
            place.tp_size,
            memory.page_bytes,
            self.transport.describe(link.instance),
        )
        link.send(told.frames())
        self._table.note_registered(link.instance)

    def _send_request(self, session: DecodeSession, source: PrefillSource, now: float) -> None:
        source.request_sent = now
        who = (session.params.room, self.place.host, self.port, self.instance)
        pages = session.pages if source.sends else None
        attempt = (session.prefix_len, session.generation, session.group)
        source.link.send(wire.Request(*who, pages, source.num_decode_ranks, *attempt).frames())

    def on_abort(self, key: int) -> None:
        """See ``SessionWorker``."""
        session = self._table.keys.get(key)
        if session is not None:
            self._endings.fail(session, 0, "aborted", "the decode side gave the request up")
        elif key not in self._table.over:
            self.emit(KVQuiesced(key))

    def on_message(self, frames: list[bytes]) -> None:
        """See ``SessionWorker``."""
        message = wire.decode_for_decode(frames)
        match message:
            case wire.Status() | wire.Aux() | wire.AbortAck() | wire.Alive():
                self.links.heard(message.instance, self.loop.time())
            case _:
                return
        match message:
            case wire.Status():
                self._status(message)
            case wire.Aux():
                self._arrival.take(message)
            case wire.AbortAck():
                self._endings.drained(message)
            case _:
                pass

    def _status(self, status: wire.Status) -> None:
        session = self._table.generations.get(status.generation)
        if session is None or session.state.is_over or session.params.room != status.room:
            return
        source = session.source(status.rank)
        if source is None or self._endings.is_replaced(source, status.instance):
            return
        source.is_acknowledged = True
        now = self.loop.time()
        self._confirm(session, now)
        is_unknown = status.code == wire.UNREGISTERED and session.num_retries < MOST_RETRIES * len(session.sources)
        if status.state is State.FAILED and is_unknown:
            session.num_retries += 1
            self.counts["retries"] += 1
            source.is_acknowledged = False
            self._register(source.link)
            self._send_request(session, source, now)
        elif status.state is State.FAILED:
            if status.code == "closed" and self._directory is not None:
                self._directory.forget(session.params.host, session.params.port)
            why = f"the prefill server ended it: {status.message or status.code}"
            self._endings.fail(session, 500, "peer_failed", why)
        elif status.state is State.TRANSFERRING:
            session.state = advance(session.state, State.TRANSFERRING)
            session.deadline = now + self.options.waiting_timeout
        # Success is what the record says; this message alone does not carry the token.

    def _confirm(self, session: DecodeSession, now: float) -> None:
        if self._directory is not None:
            self._directory.confirm(session.params.host, session.params.port, now)

    def on_tick(self, now: float) -> None:
        """See ``SessionWorker``."""
        for session in list(self._table.keys.values()):
            if now > session.deadline:
                waited = now - session.opened
                self._endings.fail(session, 500, "timeout", f"no KV after {waited:.1f} s in {session.state.name}")
                continue
            for source in session.sources:
                waited = now - source.request_sent
                if not source.is_acknowledged and waited > self.options.resend:
                    self.counts["retries"] += 1
                    self._register(source.link)
                    self._send_request(session, source, now)
                elif waited > self.options.heartbeat_interval:
                    # That the session has ended there may have been lost with a connection; then this asks again.
                    self._send_request(session, source, now)
        self._endings.look_after(now)

    def on_poll(self, now: float) -> bool:
        """See ``SessionWorker``; the prefill side moves the bytes."""
        del now
        return False

    def on_lost(self, link: Link, is_gone: bool) -> None:
        """See ``SessionWorker``."""
        why = "its process is gone" if is_gone else "it does not answer"
        for session in [*self._table.keys.values(), *self._table.over.values()]:
            if session.uses(link) and self._directory is not None:
                self._directory.forget(session.params.host, session.params.port)
        for session in list(self._table.keys.values()):
            if session.uses(link):
                message = f"Lost connection with prefill instance {link.address}: {why}"
                self._endings.fail(session, 500, "peer_lost", message)
        if is_gone:
            self._table.registered.discard(link.instance)
            self._endings.peer_gone(link)

    def _server_lost(self, server: PrefillServer, why: str) -> None:
        for session in list(self._table.keys.values()):
            if (session.params.host, session.params.port) == (server.host, server.port):
                message = f"Lost connection with prefill instance {server.host}:{server.port}: {why}"
                self._endings.fail(session, 500, "peer_lost", message)
        if self._directory is not None:
            self._lost(server.host, server.port, self._directory.last_life(server.host, server.port), why)

    def _lost(self, host: str, port: int, until: float, why: str = "another process has its address now") -> None:
        """Also those that wait for pages hear of it: at the new process they would wait for what never comes."""
        message = f"Lost connection with prefill instance {host}:{port}: {why}"
        for session in list(self._table.keys.values()):
            if (session.params.host, session.params.port) == (host, port) and session.opened <= until:
                self._endings.fail(session, 500, "peer_lost", message)
        self.emit(PrefillLost(host, port, until, message))

    def on_start(self) -> None:
        """See ``SessionWorker``."""
        place = self.place
        self._client = BootstrapClient()
        self._directory = PrefillDirectory(
            self._client, self.memory, place.tp_rank, place.tp_size, place.kv_replicated, self._lost
        )
        self._endings.directory = self._directory
        self.spawn(ServerWatch(self._client, self._directory, self.options, self._server_lost).run())

    def on_stop(self) -> None:
        """See ``SessionWorker``."""
        for session in list(self._table.keys.values()):
            self._endings.fail(session, 503, "closed", "the decode server is shutting down")

    async def on_finish(self) -> None:
        """See ``SessionWorker``."""
        if self._client is not None:
            await self._client.close()
