"""The ``tcp`` transport: plain sockets, no native library. The reference for the others.

A thread a connection moves the bytes with scattering system calls, straight out of and into registered memory. The
receiving side owns the loop that writes, checks generation and range itself, and stops at once when it is told to.
"""

from __future__ import annotations

import collections
import itertools
import platform
import threading
import time
import uuid

import msgspec

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
from sglang_lite.transfer.leases import Lease, RegionTable, check_remote
from sglang_lite.transfer.submission import check_submission
from sglang_lite.transfer.tcp_peer import TcpPeer, TcpTransfer
from sglang_lite.transfer.tcp_receiver import Receiver
from sglang_lite.transfer.tcp_wire import CALL_SECONDS, MAX_SPANS

ENGINE = "tcp"
VERSION = "1"

MOST_FENCES = 1 << 16
"""Senders that were shut out once: forgetting one would make what it knew valid again."""

_CAPABILITIES = Capabilities(
    engine=ENGINE,
    version=f"{VERSION} (Python {platform.python_version()})",
    protocol="tcp",
    locations=frozenset({"host"}),
    native_notify=True,
    cancel_stops_bytes=True,
    target_checks_range=True,
    max_inflight_spans=MAX_SPANS,
)


class TcpTransport:
    """See ``base.KVTransport``.

    Args:
        host: address to listen at, which peers can reach.
    """

    def __init__(self, host: str) -> None:
        self.instance = uuid.uuid4().hex
        self._host = host
        self._lock = threading.Lock()
        self._regions = RegionTable(_CAPABILITIES.locations)
        self._numbers = itertools.count(1)
        self._peers: dict[str, TcpPeer] = {}
        self._notes: collections.deque[tuple[str, bytes]] = collections.deque()
        self._fences: dict[str, int] = {}
        self._closed = False
        self._receiver = Receiver(host, self.instance, self._acquire, self._release, self._deliver)

    def capabilities(self) -> Capabilities:
        """See ``base.KVTransport.capabilities``."""
        return _CAPABILITIES

    def register(self, addr: int, length: int, location: str = HOST) -> RegionLease:
        """See ``base.KVTransport.register``."""
        with self._lock:
            return GuardedLease(self._regions.open(addr, length, location), self._lock)

    def describe(self, reader: str = "") -> bytes:
        """See ``base.KVTransport.describe``."""
        with self._lock:
            regions = self._regions.remote(self._fences.get(reader, 0))
        return msgspec.msgpack.encode(
            Description(ENGINE, VERSION, self.instance, self._host, self._receiver.port, b"", regions)
        )

    def connect(self, description: bytes) -> Peer:
        """See ``base.KVTransport.connect``."""
        told = decode_description(description, ENGINE, VERSION)
        peer = self._peers.get(told.instance)
        if peer is None:
            peer = self._peers[told.instance] = TcpPeer(self.instance, told)
        else:
            peer.description = told
        return peer

    def fence(self, sender: str) -> Fence | None:
        """See ``base.KVTransport.fence``: generations that the sender knows become void, its connections end."""
        with self._lock:
            if sender not in self._fences and len(self._fences) >= MOST_FENCES:
                return None
            self._fences[sender] = self._regions.next_generation()
        return self._receiver.expel(sender)

    def disconnect(self, peer: Peer) -> None:
        """See ``base.KVTransport.disconnect``."""
        known = self._peers.pop(peer.instance, None)
        if known is not None:
            known.close()

    def submit(
        self, peer: Peer, src: RegionLease, dst: RemoteRegion, spans: SpanBatch, *, notify: bytes, deadline_s: float
    ) -> TcpTransfer:
        """See ``base.KVTransport.submit``."""
        known = None if self._closed else self._peers.get(peer.instance)
        source = src.lease if isinstance(src, GuardedLease) else src
        lease = check_submission(source, known.description if known else None, dst, spans, notify)
        assert known is not None  # check_submission refuses it
        deadline = time.monotonic() + deadline_s
        transfer = TcpTransfer(next(self._numbers), lease, dst, spans, notify, deadline)
        known.put(transfer)
        return transfer

    def notifications(self) -> list[tuple[str, bytes]]:
        """See ``base.KVTransport.notifications``."""
        notes = []
        while self._notes:
            notes.append(self._notes.popleft())
        return notes

    def close(self, grace_s: float) -> None:
        """See ``base.KVTransport.close``."""
        if self._closed:
            return
        self._closed = True
        peers = list(self._peers.values())
        self._peers.clear()
        for peer in peers:
            peer.close()
        until = time.monotonic() + grace_s
        for peer in peers:
            peer.join(max(CALL_SECONDS, until - time.monotonic()))
        self._receiver.close()
        for lease in self._regions.open_leases():
            if not lease.num_users:
                lease.close()

    def _acquire(self, sender: str, region_id: int, generation: int, user: object) -> Lease | None:
        with self._lock:
            lease = self._regions.find(region_id, generation, self._fences.get(sender, 0))
            if lease is not None:
                lease.use(user)
            return lease

    def _release(self, lease: Lease, user: object) -> None:
        with self._lock:
            lease.leave(user)

    def _deliver(self, sender: str, notify: bytes) -> None:
        self._notes.append((sender, notify))


class GuardedLease:
    """A lease whose region the receiver's threads look up too."""

    def __init__(self, lease: Lease, lock: threading.Lock) -> None:
        self.lease = lease
        self._lock = lock
        self.region_id, self.generation = lease.region_id, lease.generation
        self.addr, self.length, self.location = lease.addr, lease.length, lease.location

    def close(self) -> None:
        """See ``base.RegionLease.close``."""
        with self._lock:
            self.lease.close()

    def __enter__(self) -> GuardedLease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def decode_description(description: bytes, engine: str, version: str) -> Description:
    """What a peer said of itself.

    Raises:
        TransferError: it is malformed, or of another engine or version.
    """
    try:
        told = msgspec.msgpack.decode(description, type=Description)
    except msgspec.MsgspecError as error:
        raise TransferError("rejected", f"a peer's description is malformed: {error}") from error
    if told.engine != engine:
        raise TransferError(
            "rejected",
            f"the peer transfers with {told.engine}, this side with {engine}; start both with one "
            f"--disaggregation-transfer-backend",
        )
    if len(told.instance) != 32 or not told.instance.isascii():
        raise TransferError("rejected", "a peer's description names no instance")
    for region in told.regions:
        check_remote(region)
    del version  # told for logs; a difference is the engine's to refuse
    return told
