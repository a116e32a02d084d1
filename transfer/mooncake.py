"""The ``mooncake`` transport: Mooncake's transfer engine, one id a span, notifications by the tcp transport.

Only ids of single spans settle exactly, so that "quiesced" can be told; a thread a peer submits and polls them, because
opening a session may block. An id is forgotten as soon as the engine has freed it: asking again would end the process.
"""

from __future__ import annotations

import collections
import importlib
import importlib.metadata
import itertools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from sglang_lite.transfer.base import (
    HOST,
    Capabilities,
    Description,
    Outcome,
    Peer,
    RegionLease,
    RemoteRegion,
    SpanBatch,
    TransferError,
)
from sglang_lite.transfer.leases import Lease, RegionTable
from sglang_lite.transfer.submission import check_submission
from sglang_lite.transfer.tcp import MOST_WAITING, TcpTransfer, TcpTransport, decode_description

ENGINE = "mooncake"
DISTRIBUTIONS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine")
MAX_IN_FLIGHT = 512
"""Spans under way to one peer: far below the engine's limit, at which a session gets stuck."""

_POLL_SECONDS = 0.0005
_ENVIRONMENT = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535", "MC_LOG_LEVEL": "ERROR"}
_PENDING, _DONE = 0, 1


class _Session(msgspec.Struct, frozen=True, array_like=True):
    """``Description.session``: the engine's session and the description of the control channel."""

    session: str
    control: bytes


class MooncakeTransfer(TcpTransfer):
    """See ``base.Transfer``; ``MooncakePeer`` moves it on."""

    next_span = 0
    num_flying = 0
    note: TcpTransfer | None = None

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def is_spent(self) -> bool:
        """No span is under way and none will be submitted."""
        return not self.num_flying and (self.is_over or self.next_span == len(self.spans))


class MooncakePeer:
    """A peer, and the thread that submits spans to it and polls them."""

    def __init__(self, owner: MooncakeTransport, told: Description) -> None:
        self._owner = owner
        self.description = told
        self.session = msgspec.msgpack.decode(told.session, type=_Session)
        self._control = owner.control.connect(self.session.control)
        self._alive = True
        self._closing = False
        self._condition = threading.Condition()
        self._transfers: collections.deque[MooncakeTransfer] = collections.deque()
        self._notes: collections.deque[MooncakeTransfer] = collections.deque()
        self._flying: dict[int, tuple[MooncakeTransfer, int, bool]] = {}
        self._thread: threading.Thread | None = None

    @property
    def instance(self) -> str:
        """See ``base.Peer.instance``."""
        return self.description.instance

    @property
    def regions(self) -> Sequence[RemoteRegion]:
        """See ``base.Peer.regions``."""
        return self.description.regions

    @property
    def alive(self) -> bool:
        """See ``base.Peer.alive``."""
        return self._alive

    def put(self, transfer: MooncakeTransfer) -> None:
        """Queue a transfer."""
        with self._condition:
            if len(self._transfers) + len(self._notes) >= MOST_WAITING:
                raise TransferError("engine", f"{MOST_WAITING} transfers to this peer are under way already")
            if self._closing:
                raise TransferError("closed", "the connection to this peer is closed")
            transfer.lease.use(transfer)
            self._transfers.append(transfer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mooncake transfers", daemon=True)
                self._thread.start()
            self._condition.notify()

    def close(self) -> None:
        """Submit no more; what is under way is lost, and waited for by the thread."""
        with self._condition:
            self._closing = True
            for transfer in (*self._transfers, *self._notes):
                transfer.settle(Outcome.FAILED, "peer_lost", "the connection was closed")
            self._condition.notify()

    def join(self, seconds: float) -> bool:
        """Wait for the thread; whether nothing is under way any more."""
        if self._thread is not None:
            self._thread.join(seconds)
            return not self._thread.is_alive()
        return True

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._transfers and not self._notes:
                    if self._closing:
                        return
                    self._condition.wait()
            moved = self._check()
            moved |= self._fill()
            moved |= self._finish()
            if not moved:
                time.sleep(_POLL_SECONDS)

    def _check(self) -> bool:
        moved = False
        for number, (transfer, span, is_retry) in list(self._flying.items()):
            status = self._owner.engine.transfer_check_status(number)
            if status != _PENDING and status != -2:
                del self._flying[number]  # the engine has freed it
                transfer.num_flying -= 1
                moved = True
                if status != _DONE:
                    self._failed(transfer, span, is_retry)
        return moved

    def _fill(self) -> bool:
        moved = False
        for transfer in list(self._transfers):
            while (
                len(self._flying) < MAX_IN_FLIGHT and not transfer.is_over and transfer.next_span < len(transfer.spans)
            ):
                transfer.next_span += 1
                self._submit(transfer, transfer.next_span - 1, False)
                moved = True
        return moved

    def _submit(self, transfer: MooncakeTransfer, span: int, is_retry: bool) -> None:
        number = self._owner.engine.transfer_submit_write(
            self.session.session,
            transfer.lease.addr + int(transfer.spans.src_offset[span]),
            transfer.region.addr + int(transfer.spans.dst_offset[span]),
            int(transfer.spans.length[span]),
        )
        if number:
            transfer.num_flying += 1
            self._flying[number] = (transfer, span, is_retry)
        else:
            self._failed(transfer, span, is_retry)

    def _failed(self, transfer: MooncakeTransfer, span: int, is_retry: bool) -> None:
        """A span right behind a rejected one may fail for no reason of its own: it is tried twice."""
        if transfer.is_over:
            return
        if not is_retry:
            self._submit(transfer, span, True)
            return
        self._alive = self._owner.engine.send_probe(self.session.session) == 0
        if self._alive:
            transfer.settle(Outcome.FAILED, "rejected", f"the peer refused span {span}")
        else:
            transfer.settle(Outcome.FAILED, "peer_lost", f"{self.session.session} does not answer")

    def _finish(self) -> bool:
        moved = False
        for transfer in [transfer for transfer in self._transfers if transfer.is_spent]:
            moved = True
            if not transfer.is_over and transfer.notify:
                transfer.note = self._owner.send_note(self._control, transfer.notify)
                self._notes.append(transfer)
            else:
                transfer.settle(Outcome.DONE)
            with self._condition:
                self._transfers.remove(transfer)
            transfer.rest()
        while self._notes and (note := self._notes[0].note) is not None and note.is_over:
            moved = True
            self._notes[0].settle(note.poll(), note.reason, note.detail)
            self._notes.popleft()
        return moved


class MooncakeTransport:
    """See ``base.KVTransport``.

    Args:
        host: address that peers can reach; the engine itself listens at all of them.
    """

    def __init__(self, host: str) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise TransferError("engine", f"Mooncake's transfer engine does not start at {host}; see its log above")
        self._session = f"{host}:{self.engine.get_rpc_port()}"
        self.control = TcpTransport(host)
        self.instance = self.control.instance
        self._mark = np.zeros(1, dtype=np.uint8)
        self._mark_lease = self.control.register(self._mark.ctypes.data, 1)
        self._capabilities = _capabilities(self.engine)
        self._regions = RegionTable(self._capabilities.locations, self._register, self._unregister)
        self._numbers = itertools.count(1)
        self._peers: dict[str, MooncakePeer] = {}
        self._closed = False

    def capabilities(self) -> Capabilities:
        """See ``base.KVTransport.capabilities``."""
        return self._capabilities

    def register(self, addr: int, length: int, location: str = HOST) -> RegionLease:
        """See ``base.KVTransport.register``."""
        return self._regions.open(addr, length, location)

    def describe(self) -> bytes:
        """See ``base.KVTransport.describe``."""
        session = msgspec.msgpack.encode(_Session(self._session, self.control.describe()))
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
            peer = self._peers[told.instance] = MooncakePeer(self, told)
        except msgspec.MsgspecError as error:
            raise TransferError("rejected", f"a peer's session is malformed: {error}") from error
        return peer

    def disconnect(self, peer: Peer) -> None:
        """See ``base.KVTransport.disconnect``."""
        known = self._peers.pop(peer.instance, None)
        if known is not None:
            known.close()

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
        """A notification, by the control channel."""
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
        peers = list(self._peers.values())
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
    return Capabilities(ENGINE, version, "tcp", frozenset(locations), False, False, True, MAX_IN_FLIGHT)
