"""The ``mooncake`` transport: Mooncake's transfer engine, one id a span, notifications by the tcp transport.

The engine takes any protocol and moves the bytes by TCP where it finds no host channel adapter, so what it runs is read
from what it found.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import logging
import os
import time
from typing import Any

import msgspec
import numpy as np

from sglang_lite.transfer.base import (
    HOST,
    Capabilities,
    Description,
    Fence,
    Peer,
    RegionLease,
    RemoteRegion,
    SpanBatch,
    TransferError,
)
from sglang_lite.transfer.leases import Lease, RegionTable
from sglang_lite.transfer.mooncake_peer import MAX_IN_FLIGHT, MooncakePeer, MooncakeTransfer, Session
from sglang_lite.transfer.submission import check_submission
from sglang_lite.transfer.tcp import TcpTransport, decode_description
from sglang_lite.transfer.tcp_peer import TcpTransfer

ENGINE = "mooncake"
DISTRIBUTIONS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine")
_ENVIRONMENT = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535", "MC_LOG_LEVEL": "ERROR"}
"""Read when the first engine of a process starts."""

_IPV6 = "MC_USE_IPV6"

_LOG = logging.getLogger(__name__)


def prepare_environment(host: str) -> None:
    """Set what the engine reads when it is loaded, and when the first one of a process starts.

    Args:
        host: address of this side; with one of IPv6 no peer can have another kind.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if ":" in host:
        os.environ[_IPV6] = "1"


class MooncakeTransport:
    """See ``base.KVTransport``.

    Args:
        host: address that peers can reach; the engine itself listens at all of them.
        force_tcp: use TCP also where there is a host channel adapter. It holds for all engines of a process, so that
            the first one decides.
        devices: names of host channel adapters, a comma between them; empty for those that the engine finds.
        port: where the engine listens; 0 for any.

    Raises:
        TransferError: the engine does not start.
    """

    def __init__(self, host: str, *, force_tcp: bool = False, devices: str = "", port: int = 0) -> None:
        prepare_environment(host)
        if force_tcp:
            os.environ["MC_FORCE_TCP"] = "1"
        if port:
            os.environ["MC_MIN_RPC_PORT"] = os.environ["MC_MAX_RPC_PORT"] = str(port)
        wanted = "tcp" if force_tcp else "rdma"
        self.engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", wanted, devices) != 0:
            raise TransferError("engine", f"Mooncake's transfer engine does not start at {host}; see its log above")
        port = self.engine.get_rpc_port()
        self._session = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.control = TcpTransport(host)
        self.instance = self.control.instance
        self._mark = np.zeros(1, dtype=np.uint8)
        self._mark_lease = self.control.register(self._mark.ctypes.data, 1)
        self._capabilities = _capabilities(self.engine)
        if self._capabilities.protocol != wanted:
            _LOG.warning(
                "Mooncake was asked for %s but runs %s: its topology lists no host channel adapter that it may use",
                wanted,
                self._capabilities.protocol,
            )
        self._regions = RegionTable(self._capabilities.locations, self._register, self._unregister)
        self._numbers = itertools.count(1)
        self._peers: dict[str, MooncakePeer] = {}
        self._leaving: list[MooncakePeer] = []
        self._closed = False

    def capabilities(self) -> Capabilities:
        """See ``base.KVTransport.capabilities``."""
        return self._capabilities

    def register(self, addr: int, length: int, location: str = HOST) -> RegionLease:
        """See ``base.KVTransport.register``."""
        return self._regions.open(addr, length, location)

    def describe(self, reader: str = "") -> bytes:
        """See ``base.KVTransport.describe``."""
        del reader
        session = msgspec.msgpack.encode(Session(self._session, self.control.describe()))
        host, _, port = self._session.rpartition(":")
        version = self._capabilities.version
        return msgspec.msgpack.encode(
            Description(ENGINE, version, self.instance, host, int(port), session, self._regions.remote())
        )

    def connect(self, description: bytes) -> Peer:
        """See ``base.KVTransport.connect``."""
        told = decode_description(description, ENGINE, self._capabilities.version)
        peer = self._peers.get(told.instance)
        if peer is not None:
            peer.description = told
            return peer
        try:
            session = msgspec.msgpack.decode(told.session, type=Session)
        except msgspec.MsgspecError as error:
            raise TransferError("rejected", f"a peer's session is malformed: {error}") from error
        control = self.control.connect(session.control)
        if not control.regions:
            self.control.disconnect(control)
            raise TransferError("rejected", "a peer's control channel describes no region for notifications")
        peer = MooncakePeer(self.engine, told, session, control, self.send_note)
        self._peers[told.instance] = peer
        return peer

    def fence(self, sender: str) -> Fence | None:
        """See ``base.KVTransport.fence``: memory that is registered again has its old address."""
        del sender
        return None

    def disconnect(self, peer: Peer) -> None:
        """See ``base.KVTransport.disconnect``."""
        known = self._peers.pop(peer.instance, None)
        if known is not None:
            known.close()
            self.control.disconnect(known.control)
            self._leaving = [peer for peer in (*self._leaving, known) if not peer.join(0.0)]

    def submit(
        self, peer: Peer, src: RegionLease, dst: RemoteRegion, spans: SpanBatch, *, notify: bytes, deadline_s: float
    ) -> MooncakeTransfer:
        """See ``base.KVTransport.submit``."""
        known = None if self._closed else self._peers.get(peer.instance)
        lease = check_submission(src, known.description if known else None, dst, spans, notify)
        transfer = MooncakeTransfer(next(self._numbers), lease, dst, spans, notify, time.monotonic() + deadline_s)
        assert known is not None  # check_submission refuses it
        known.put(transfer)
        return transfer

    def send_note(self, control: Peer, note: bytes) -> TcpTransfer:
        """A notification, by the control channel; see ``NoteSender``."""
        nothing = np.zeros(0, dtype=np.int64)
        spans = SpanBatch(nothing, nothing, nothing)
        return self.control.submit(control, self._mark_lease, control.regions[0], spans, notify=note, deadline_s=30.0)

    def notifications(self) -> list[tuple[str, bytes]]:
        """See ``base.KVTransport.notifications``."""
        return self.control.notifications()

    def close(self, grace_s: float) -> None:
        """See ``base.KVTransport.close``."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + grace_s
        peers = [*self._peers.values(), *self._leaving]
        for peer in peers:
            peer.close()
        quiet = [peer.join(max(0.0, until - time.monotonic())) for peer in peers]
        self.control.close(max(0.0, until - time.monotonic()))
        for lease in self._regions.open_leases():
            if not lease.num_users:
                lease.close()
        if all(quiet):
            self.engine = None

    def _register(self, lease: Lease) -> None:
        code = self.engine.register_memory(lease.addr, lease.length)
        if code != 0:
            raise TransferError("rejected", f"Mooncake refuses {lease.length} bytes at {lease.addr:#x}: error {code}")

    def _unregister(self, lease: Lease) -> None:
        code = self.engine.unregister_memory(lease.addr)
        if code != 0:
            raise TransferError("engine", f"Mooncake does not unregister {lease.addr:#x}: error {code}")


def _capabilities(engine: Any) -> Capabilities:
    module = importlib.import_module("mooncake.engine")
    version = "unknown"
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    locations = {"host", "cuda"} if module.SUPPORT_CUDA else {"host"}
    protocol = protocol_of(engine.get_local_topology())
    return Capabilities(ENGINE, version, protocol, frozenset(locations), False, False, protocol == "tcp", MAX_IN_FLIGHT)


def protocol_of(topology: str) -> str:
    """What carries the bytes: "rdma" when a location has a host channel adapter, else "tcp".

    Args:
        topology: JSON of the engine: of each location the adapters near to it, and the others.

    Raises:
        TransferError: it is something else.
    """
    if os.environ.get("MC_FORCE_TCP", "0") not in ("", "0"):
        return "tcp"
    try:
        places = msgspec.json.decode(topology, type=dict[str, list[list[str]]])
    except msgspec.MsgspecError as error:
        raise TransferError("engine", f"Mooncake describes its topology in a way not known here: {error}") from error
    return "rdma" if any(adapters for place in places.values() for adapters in place) else "tcp"
