"""The ``nixl`` transport: an agent of NIXL with its UCX backend; notifications travel with the transfers.

NIXL checks ranges only against what the initiator knows, takes one region twice, has no deadline, and lets the bytes of
a released handle land: all four are settled here. A handle is released only once it is done or broken, and the engine
moves only while somebody asks it for something, on both sides; a thread of the transport does, so that ``poll`` reads
a flag.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.metadata
import itertools
import threading
import time
import uuid
from typing import Any

import msgspec

from sglang_lite.transfer.base import (
    HOST,
    Capabilities,
    Description,
    Fence,
    Outcome,
    Peer,
    RegionLease,
    RemoteRegion,
    SpanBatch,
    TransferError,
)
from sglang_lite.transfer.leases import Lease, RegionTable
from sglang_lite.transfer.nixl_engine import (
    capabilities_of,
    device_of,
    errors_of,
    kind_of,
    load_module,
    prepare_environment,
    rows_of,
)
from sglang_lite.transfer.nixl_peer import NixlPeer, NixlTransfer, Session
from sglang_lite.transfer.submission import check_submission
from sglang_lite.transfer.tcp import decode_description
from sglang_lite.transfer.tcp_peer import MOST_WAITING

ENGINE = "nixl"
_BACKEND = "UCX"
_BUSY_SECONDS, _IDLE_SECONDS = 0.00005, 0.001
"""Between two looks at the engine, with transfers under way here and without."""

_kept: list[Any] = []
"""Agents that were closed with handles that had not settled: ending one would release them, and let go of memory that
the network may still touch."""


class NixlTransport:
    """See ``base.KVTransport``.

    Args:
        host: told to peers for their logs; UCX itself listens where ``UCX_NET_DEVICES`` says.

    Raises:
        TransferError: the agent does not start.
    """

    def __init__(self, host: str) -> None:
        self.instance = uuid.uuid4().hex
        self._host = host
        prepare_environment()
        module = load_module()
        bindings = importlib.import_module(module.__name__.replace("._api", "._bindings"))
        self._gone: type[Exception] = bindings.nixlRemoteDisconnectError
        self._errors = errors_of(bindings)
        startup: tuple[type[Exception], ...] = (*self._errors, RuntimeError)
        try:
            self._agent = module.nixl_agent(
                self.instance, module.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            )
        except startup as error:
            raise TransferError("engine", f"NIXL's agent does not start: {error}") from error
        self._capabilities = capabilities_of(module)
        self._regions = RegionTable(self._capabilities.locations, self._register, self._unregister)
        self._registered: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._peers: dict[str, NixlPeer] = {}
        self._leaving: list[NixlPeer] = []
        self._notes: collections.deque[tuple[str, bytes]] = collections.deque()
        # Every call of the agent is made with this lock.
        self._lock = threading.RLock()
        self._closed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="nixl transfers", daemon=True)
        self._thread.start()

    def capabilities(self) -> Capabilities:
        """See ``base.KVTransport.capabilities``."""
        return self._capabilities

    def register(self, addr: int, length: int, location: str = HOST) -> RegionLease:
        """See ``base.KVTransport.register``."""
        return self._regions.open(addr, length, location)

    def describe(self, reader: str = "") -> bytes:
        """See ``base.KVTransport.describe``."""
        del reader
        with self._lock:
            session = Session.of(bytes(self._agent.get_agent_metadata()))
        version = self._capabilities.version
        return msgspec.msgpack.encode(
            Description(ENGINE, version, self.instance, self._host, 0, session, self._regions.remote())
        )

    def connect(self, description: bytes) -> Peer:
        """See ``base.KVTransport.connect``."""
        told = decode_description(description, ENGINE, self._capabilities.version)
        metadata = Session.metadata_of(told.session)
        with self._lock:
            try:
                name = bytes(self._agent.add_remote_agent(metadata)).decode(errors="replace")
            except self._errors as error:
                raise TransferError("rejected", f"NIXL does not take a peer's metadata: {error}") from error
            if name != told.instance:
                self._agent.remove_remote_agent(name)
                raise TransferError("rejected", f"a peer's metadata is of {name!r}, its description of another")
            peer = self._peers.get(told.instance) or self._returning(told.instance) or NixlPeer(told)
            peer.description = told
            self._peers[told.instance] = peer
        return peer

    def fence(self, sender: str) -> Fence | None:
        """See ``base.KVTransport.fence``: the sender writes, also into memory that is not registered."""
        del sender
        return None

    def disconnect(self, peer: Peer) -> None:
        """See ``base.KVTransport.disconnect``."""
        with self._lock:
            known = self._peers.pop(peer.instance, None)
            if known is not None:
                for transfer in known.transfers.values():
                    transfer.settle(Outcome.FAILED, "peer_lost", "the connection was closed")
                self._leaving.append(known)
                self._forget()

    def submit(
        self, peer: Peer, src: RegionLease, dst: RemoteRegion, spans: SpanBatch, *, notify: bytes, deadline_s: float
    ) -> NixlTransfer:
        """See ``base.KVTransport.submit``."""
        known = None if self._closed else self._peers.get(peer.instance)
        lease = check_submission(src, known.description if known else None, dst, spans, notify)
        assert known is not None  # check_submission refuses it
        transfer = NixlTransfer(next(self._numbers), lease, dst, spans, notify, time.monotonic() + deadline_s)
        with self._lock:
            if len(known.transfers) >= MOST_WAITING:
                raise TransferError("engine", f"{MOST_WAITING} transfers to this peer are under way already")
            lease.use(transfer)
            try:
                self._post(known, transfer)
            except self._errors as error:
                self._fail(known, transfer, error)
        return transfer

    def notifications(self) -> list[tuple[str, bytes]]:
        """See ``base.KVTransport.notifications``."""
        if not self._closed:
            with self._lock, contextlib.suppress(*self._errors):
                self._take_notes()
        notes = []
        while self._notes:
            notes.append(self._notes.popleft())
        return notes

    def close(self, grace_s: float) -> None:
        """See ``base.KVTransport.close``."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + grace_s
        for peer in list(self._peers.values()):
            self.disconnect(peer)
        while self._leaving and time.monotonic() < until:
            self._stop.wait(_IDLE_SECONDS)
        self._stop.set()
        self._thread.join()
        if self._leaving:
            _kept.append((self._agent, self._leaving))
        for lease in self._regions.open_leases():
            if not lease.num_users:
                lease.close()
        self._agent = None

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                with contextlib.suppress(*self._errors):  # of a peer that is gone; its transfers tell
                    self._take_notes()
                active = [peer for peer in (*self._peers.values(), *self._leaving) if peer.transfers]
                for peer in active:
                    for transfer in list(peer.transfers.values()):
                        self._check(peer, transfer)
                self._forget()
            self._stop.wait(_BUSY_SECONDS if active else _IDLE_SECONDS)

    def _post(self, peer: NixlPeer, transfer: NixlTransfer) -> None:
        if not len(transfer.spans):
            if transfer.notify:
                self._agent.send_notif(peer.instance, transfer.notify)
            transfer.settle(Outcome.DONE)
            transfer.rest()
            return
        spans, lease, region = transfer.spans, transfer.lease, transfer.region
        source = rows_of(lease.addr, spans.src_offset, spans.length, lease.location)
        target = rows_of(region.addr, spans.dst_offset, spans.length, region.location)
        transfer.handle = self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(source, kind_of(lease.location)),
            self._agent.get_xfer_descs(target, kind_of(region.location)),
            peer.instance,
            transfer.notify,
        )
        peer.transfers[transfer.number] = transfer
        self._settle(peer, transfer, self._agent.transfer(transfer.handle))

    def _check(self, peer: NixlPeer, transfer: NixlTransfer) -> None:
        try:
            state = self._agent.check_xfer_state(transfer.handle)
        except self._errors as error:
            self._fail(peer, transfer, error)
        else:
            self._settle(peer, transfer, state)

    def _settle(self, peer: NixlPeer, transfer: NixlTransfer, state: str) -> None:
        if state == "PROC":
            transfer.poll()  # for its deadline
            return
        if state == "DONE":
            transfer.settle(Outcome.DONE)
        else:
            transfer.settle(Outcome.FAILED, "engine", f"NIXL reports {state}")
        self._finish(peer, transfer)

    def _fail(self, peer: NixlPeer, transfer: NixlTransfer, error: Exception) -> None:
        reason = "engine"
        if isinstance(error, self._gone):
            reason, peer.alive = "peer_lost", False
        transfer.settle(Outcome.FAILED, reason, f"NIXL: {error}")
        self._finish(peer, transfer)

    def _finish(self, peer: NixlPeer, transfer: NixlTransfer) -> None:
        peer.transfers.pop(transfer.number, None)
        if transfer.handle is not None:
            with contextlib.suppress(*self._errors):  # that of a broken connection may be gone with it
                self._agent.release_xfer_handle(transfer.handle)
            transfer.handle = None
        transfer.rest()

    def _take_notes(self) -> None:
        for sender, notes in self._agent.get_new_notifs().items():
            self._notes.extend((sender, bytes(note)) for note in notes)

    def _returning(self, instance: str) -> NixlPeer | None:
        """A peer that was forgotten while it had transfers under way, and comes back."""
        for peer in self._leaving:
            if peer.instance == instance:
                self._leaving.remove(peer)
                peer.alive = True
                return peer
        return None

    def _forget(self) -> None:
        for peer in [peer for peer in self._leaving if not peer.transfers]:
            self._leaving.remove(peer)
            with contextlib.suppress(*self._errors):  # the agent may have noticed that it is gone
                self._agent.remove_remote_agent(peer.instance)

    def _register(self, lease: Lease) -> None:
        row = [(lease.addr, lease.length, device_of(lease.location), "")]
        with self._lock:
            try:
                self._registered[lease.region_id] = self._agent.register_memory(row, kind_of(lease.location))
            except self._errors as error:
                raise TransferError(
                    "rejected", f"NIXL refuses {lease.length} bytes at {lease.addr:#x}, {lease.location}: {error}"
                ) from error

    def _unregister(self, lease: Lease) -> None:
        with self._lock:
            registered = self._registered.pop(lease.region_id)
            if self._agent is not None:
                self._agent.deregister_memory(registered)
