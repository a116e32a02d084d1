"""Sessions of the side that generates: finds the prefill server, offers pages, takes KV and first token."""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging

import numpy as np

from sglang_lite.disaggregation import frames as wire
from sglang_lite.disaggregation.base import FAKE_HOST, FirstToken, KVArrived, KVFailed, KVQuiesced, SessionStats
from sglang_lite.disaggregation.bootstrap_client import BootstrapClient, HandshakeError
from sglang_lite.disaggregation.decode_state import DecodeSession
from sglang_lite.disaggregation.descriptor import page_checksums
from sglang_lite.disaggregation.links import Link
from sglang_lite.disaggregation.options import SessionOptions
from sglang_lite.disaggregation.pool_memory import PoolMemory
from sglang_lite.disaggregation.prefill_directory import PrefillDirectory, PrefillServer
from sglang_lite.disaggregation.prefill_sessions import UNREGISTERED
from sglang_lite.disaggregation.recent import Recent
from sglang_lite.disaggregation.states import State, advance
from sglang_lite.disaggregation.worker import Place, SessionWorker
from sglang_lite.transfer.base import KVTransport
from sglang_lite.types import Int32Array, TransferParams

logger = logging.getLogger(__name__)

MOST_FINISHED = 1 << 14
MOST_RETRIES = 3
"""Times that a session registers again with a prefill rank that does not know this process."""

_NO_PAGES: Int32Array = np.zeros(0, dtype=np.int32)


class DecodeWorker(SessionWorker):
    """See ``base.DecodeSessions``."""

    name = "decode sessions"

    def __init__(self, place: Place, memory: PoolMemory, transport: KVTransport, options: SessionOptions) -> None:
        super().__init__(place, memory, transport, options)
        self._client: BootstrapClient | None = None
        self._directory: PrefillDirectory | None = None
        self._generations = itertools.count(1)
        self._rooms: dict[int, DecodeSession] = {}
        self._keys: dict[int, DecodeSession] = {}
        self._by_generation: dict[int, DecodeSession] = {}
        self._over: dict[int, DecodeSession] = {}
        self._registered: set[str] = set()
        self._finished: Recent[int, str] = Recent(MOST_FINISHED)

    # From the core's thread.

    def open(
        self, key: int, rid: str, params: TransferParams, pages: Int32Array, num_tokens: int, decode_prefix_len: int
    ) -> None:
        """See ``base.DecodeSessions``."""
        self.call(self._open, key, rid, params, np.array(pages, dtype=np.int32), num_tokens, decode_prefix_len)

    def refuse(self, rid: str, params: TransferParams, message: str) -> None:
        """See ``base.DecodeSessions``."""
        self.call(self._refuse, rid, params, message)

    def abort(self, key: int) -> None:
        """See ``base.Sessions``."""
        self.call(self._abort, key)

    def stats(self) -> SessionStats:
        """See ``base.Sessions``."""
        count = self.counts
        return SessionStats(
            by_state=dict(collections.Counter(session.state.name.lower() for session in list(self._keys.values()))),
            quarantined=sum(key >= 0 for key in list(self._over)),
            bytes=count["bytes"],
            spans=count["spans"],
            transfers=count["transfers"],
            seconds=self.seconds,
            retries=count["retries"],
            failures=dict(self.failures),
            completed=count["transfers"],
            pending=len(self._keys),
        )

    # On the loop.

    def _open(
        self, key: int, rid: str, params: TransferParams, pages: Int32Array, num_tokens: int, prefix_len: int
    ) -> None:
        if params.host == FAKE_HOST:
            self.emit(KVArrived(key, FirstToken(0)))
            return
        if params.room in self._rooms:
            self.failures["duplicate"] += 1
            message = f"bootstrap room {params.room} is in use by another request; rooms are used by one at a time"
            self.emit(KVFailed(key, 400, message, True, "duplicate"))
            return
        now = self.loop.time()
        generation = next(self._generations)
        session = DecodeSession(
            key, rid, params, pages, num_tokens, prefix_len, generation, now, now + self.options.bootstrap_timeout
        )
        self._rooms[params.room] = self._keys[key] = self._by_generation[generation] = session
        session.task = self.spawn(self._handshake(session))

    async def _handshake(self, session: DecodeSession) -> None:
        if self._directory is None:
            return
        try:
            address = await self._directory.find(session.params, self.options.bootstrap_timeout)
            if session.state.is_over:
                return
            now = self.loop.time()
            link = self.link_to(address.rank_ip, address.rank_port, address.instance or "")
        except (HandshakeError, OSError) as error:
            if not session.state.is_over:
                self._directory.forget(session.params.host, session.params.port)
                self._fail(session, 500, "handshake", f"Decode handshake failed: {error}")
            return
        if not link.users:
            link.last_heard = now
        link.users.add(session.key)
        session.link = link
        if link.instance not in self._registered:
            self._register(link)
        session.state = advance(session.state, State.WAITING_FOR_INPUT)
        session.deadline = now + self.options.waiting_timeout
        self._send_request(session, now)

    def _refuse(self, rid: str, params: TransferParams, message: str) -> None:
        if params.host == FAKE_HOST or params.room in self._rooms:
            return
        now, generation = self.loop.time(), next(self._generations)
        session = DecodeSession(-generation, rid, params, _NO_PAGES, 0, 0, generation, now, now, State.FAILED)
        session.why = message
        self._by_generation[generation] = self._over[session.key] = session
        self.spawn(self._tell_refusal(session))

    async def _tell_refusal(self, session: DecodeSession) -> None:
        try:
            if self._directory is None:
                return
            address = await self._directory.find(session.params, 0.0, must_fit=False)
            link = self.link_to(address.rank_ip, address.rank_port, address.instance or "")
            if not link.users:
                link.last_heard = self.loop.time()
            link.users.add(session.key)
            session.link = link
            self._send_abort(session)
        except (HandshakeError, OSError) as error:
            logger.warning("%s does not hear that its request %s was given up: %s", session.peer, session.rid, error)
        finally:
            if session.link is None:
                self._end(session)

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
            self.transport.describe(),
        )
        link.send(told.frames())
        if len(self._registered) >= self.options.max_sockets:
            self._registered.clear()  # they are told again
        self._registered.add(link.instance)

    def _send_request(self, session: DecodeSession, now: float) -> None:
        session.request_sent = now
        request = wire.Request(
            session.params.room,
            self.place.host,
            self.port,
            self.instance,
            session.pages,
            1,
            session.prefix_len,
            session.generation,
        )
        if session.link is not None:
            session.link.send(request.frames())

    def _abort(self, key: int) -> None:
        session = self._keys.get(key)
        if session is not None:
            self._fail(session, 0, "aborted", "the decode side gave the request up")
        elif key not in self._over:
            self.emit(KVQuiesced(key))

    def on_message(self, frames: list[bytes]) -> None:
        """See ``SessionWorker``."""
        message = wire.decode_for_decode(frames)
        match message:
            case wire.Status():
                self._heard(message.instance)
                self._status(message)
            case wire.Aux():
                self._heard(message.instance)
                self._aux(message)
            case wire.AbortAck():
                self._heard(message.instance)
                self._drained(message)
            case wire.Alive():
                self._heard(message.instance)
            case _:
                pass

    def _heard(self, instance: str) -> None:
        self.links.heard(instance, self.loop.time())

    def _status(self, status: wire.Status) -> None:
        session = self._by_generation.get(status.generation)
        if session is None or session.state.is_over or session.params.room != status.room:
            return
        if self._is_replaced(session, status.instance):
            return
        session.is_acknowledged = True
        now = self.loop.time()
        self._confirm(session, now)
        is_unknown = status.code == UNREGISTERED and session.num_retries < MOST_RETRIES
        if status.state is State.FAILED and is_unknown and session.link is not None:
            session.num_retries += 1
            self.counts["retries"] += 1
            session.is_acknowledged = False
            self._register(session.link)
            self._send_request(session, now)
        elif status.state is State.FAILED:
            if status.code == "closed" and self._directory is not None:
                self._directory.forget(session.params.host, session.params.port)
            self._fail(session, 500, "peer_failed", f"the prefill server ended it: {status.message or status.code}")
        elif status.state is State.TRANSFERRING:
            session.state = advance(session.state, State.TRANSFERRING)
            session.deadline = now + self.options.waiting_timeout
        # Success is what the record says; this message alone does not carry the token.

    def _confirm(self, session: DecodeSession, now: float) -> None:
        if self._directory is not None:
            self._directory.confirm(session.params.host, session.params.port, now)

    def _aux(self, aux: wire.Aux) -> None:
        session = self._by_generation.get(aux.generation)
        if session is None or session.link is None or session.params.room != aux.room:
            link = self.links.heard(aux.instance, self.loop.time())
            message = self._finished.get(aux.generation)
            if link is not None:
                why = "this session is over on the decode side" if message is None else message
                link.send(wire.AuxAck(aux.room, aux.generation, self.instance, why).frames())
        elif not session.is_verifying and not session.state.is_over:
            session.is_verifying = True
            if self.options.verify_checksums:
                session.task = self.spawn(self._verify(session, aux.record))
            else:
                self._settle(session, aux.record, self._wrong_count(session, aux.record))

    async def _verify(self, session: DecodeSession, record: wire.AuxRecord) -> None:
        wrong = self._wrong_count(session, record)
        if not wrong and len(record.checksums) != len(session.pages):
            wrong = f"{len(record.checksums)} checksums for {len(session.pages)} pages; both sides must verify"
        if not wrong:
            pages = [self.memory.page(index) for index in session.pages.tolist()]
            own = await self.loop.run_in_executor(self.hashing, page_checksums, pages)
            bad = [at for at, (here, there) in enumerate(zip(own, record.checksums, strict=True)) if here != there]
            if bad:
                wrong = f"checksum mismatch: {len(bad)} of {len(own)} pages are damaged, the first is page {bad[0]}"
        if not session.state.is_over:
            self._settle(session, record, wrong)

    def _wrong_count(self, session: DecodeSession, record: wire.AuxRecord) -> str:
        if record.num_pages != len(session.pages):
            return f"{record.num_pages} pages were sent where {len(session.pages)} were wanted"
        return ""

    def _settle(self, session: DecodeSession, record: wire.AuxRecord, wrong: str) -> None:
        if session.link is not None:
            ack = wire.AuxAck(session.params.room, session.generation, self.instance, wrong)
            session.link.send(ack.frames())
        self._finished.put(session.generation, wrong)
        if wrong:
            # Every transfer had ended before the record was sent.
            self._end(session)
            self._report(session, 500, "corrupt", wrong, True)
            return
        session.state = advance(session.state, State.SUCCESS)
        self.counts["transfers"] += 1
        self.counts["spans"] += record.num_pages
        self.counts["bytes"] += record.num_bytes
        self.seconds += self.loop.time() - session.opened
        self._end(session)
        self.emit(KVArrived(session.key, record.first))

    def _fail(self, session: DecodeSession, status: int, reason: str, message: str) -> None:
        """End it; status 0 when the core itself wanted that."""
        if session.link is None:
            self._end(session)
            if session.task is not None and session.task is not asyncio.current_task(self.loop):
                session.task.cancel()
            self._report(session, status, reason, message, True)
            if reason != "closed":
                self._refuse(session.rid, session.params, message)
            return
        self._keys.pop(session.key, None)
        self._rooms.pop(session.params.room, None)
        session.state = State.FAILED
        session.why = message
        self._over[session.key] = session
        self._report(session, status, reason, message, False)
        self._send_abort(session)

    def _report(self, session: DecodeSession, status: int, reason: str, message: str, quiesced: bool) -> None:
        self.failures[reason] += 1
        session.state = State.FAILED
        text = f"KV transfer failed for room {session.params.room} from {session.peer}: {message}"
        logger.warning("decode session of request %s at %s:%d: %s", session.rid, self.place.host, self.port, text)
        if status:
            self.emit(KVFailed(session.key, status, text, quiesced, reason))
        elif quiesced:
            self.emit(KVQuiesced(session.key))

    def _send_abort(self, session: DecodeSession) -> None:
        session.request_sent = self.loop.time()
        if session.link is None:
            return
        abort = wire.Abort(
            session.params.room,
            self.place.host,
            self.port,
            session.generation,
            self.instance,
            session.why[:1000],
            session.link.instance,
        )
        session.link.send(abort.frames())

    def _drained(self, ack: wire.AbortAck) -> None:
        session = self._by_generation.get(ack.generation)
        if session is not None and session.key in self._over and not self._is_replaced(session, ack.instance):
            self._rest(session)

    def _rest(self, session: DecodeSession) -> None:
        self._end(session)
        if session.key >= 0:
            self.emit(KVQuiesced(session.key))

    def _is_replaced(self, session: DecodeSession, instance: str) -> bool:
        """Another process answers at the address of the session's prefill rank, which is gone therefore."""
        link = session.link
        if link is None or link.instance in ("", instance):
            return False
        self.bury(link)
        return True

    def _end(self, session: DecodeSession) -> None:
        self._keys.pop(session.key, None)
        self._over.pop(session.key, None)
        self._by_generation.pop(session.generation, None)
        if self._rooms.get(session.params.room) is session:
            del self._rooms[session.params.room]
        if session.link is not None:
            session.link.users.discard(session.key)

    def on_tick(self, now: float) -> None:
        """See ``SessionWorker``."""
        for session in list(self._keys.values()):
            if now > session.deadline:
                waited = now - session.opened
                self._fail(session, 500, "timeout", f"no KV after {waited:.1f} s in {session.state.name}")
            elif session.link is None or session.is_acknowledged:
                continue
            elif now - session.request_sent > self.options.resend:
                self.counts["retries"] += 1
                self._register(session.link)
                self._send_request(session, now)
        for session in list(self._over.values()):
            if session.link is not None and now - session.request_sent > self.options.resend:
                self.counts["retries"] += 1
                self._send_abort(session)

    def on_poll(self, now: float) -> bool:
        """See ``SessionWorker``; the prefill side moves the bytes."""
        del now
        return False

    def on_lost(self, link: Link, is_gone: bool) -> None:
        """See ``SessionWorker``."""
        why = "its process is gone" if is_gone else "it does not answer"
        for session in [*self._keys.values(), *self._over.values()]:
            if session.link is link and self._directory is not None:
                self._directory.forget(session.params.host, session.params.port)
        for session in list(self._keys.values()):
            if session.link is link:
                self._fail(session, 500, "peer_lost", f"Lost connection with prefill instance {link.address}: {why}")
        if is_gone:
            self._registered.discard(link.instance)
            self.loop.call_later(self.options.gone_grace, self._rest_all, link)

    def _rest_all(self, link: Link) -> None:
        """Its process is gone, and its last bytes have arrived or were dropped."""
        for session in list(self._over.values()):
            if session.link is link:
                self._rest(session)

    async def _watch_servers(self) -> None:
        while self._client is not None and self._directory is not None:
            await asyncio.sleep(self.options.heartbeat_interval)
            await asyncio.gather(*(self._check_health(server) for server in self._directory.servers()))

    async def _check_health(self, server: PrefillServer) -> None:
        if self._client is None or self._directory is None:
            return
        instance = await self._client.health(server.host, server.port)
        if instance is not None and server.health_instance in (None, instance):
            server.health_failures, server.health_instance = 0, instance
            return
        server.health_failures += 1
        replaced = instance is not None
        if replaced or server.health_failures >= self.options.heartbeat_max_failure:
            self._directory.forget(server.host, server.port)
            why = "another process has its address now" if replaced else "its bootstrap server does not answer"
            for session in list(self._keys.values()):
                if (session.params.host, session.params.port) == (server.host, server.port):
                    where = f"{server.host}:{server.port}"
                    self._fail(session, 500, "peer_lost", f"Lost connection with prefill instance {where}: {why}")

    def on_start(self) -> None:
        """See ``SessionWorker``."""
        self._client = BootstrapClient()
        place = self.place
        self._directory = PrefillDirectory(self._client, self.memory, place.tp_rank, place.tp_size, place.kv_replicated)
        self.spawn(self._watch_servers())

    def on_stop(self) -> None:
        """See ``SessionWorker``."""
        for session in list(self._keys.values()):
            self._fail(session, 503, "closed", "the decode server is shutting down")

    async def on_finish(self) -> None:
        """See ``SessionWorker``."""
        if self._client is not None:
            await self._client.close()
