"""A peer of the ``tcp`` transport, and its transfers: what waits, what was sent, what was acknowledged."""

from __future__ import annotations

import collections
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from sglang_lite.transfer.base import Description, Outcome, RemoteRegion, SpanBatch, TransferError
from sglang_lite.transfer.leases import Lease
from sglang_lite.transfer.tcp_wire import (
    ACCEPTED,
    ACK,
    CALL_SECONDS,
    MAGIC,
    Gone,
    Header,
    Stopped,
    memory,
    receive_bytes,
    send_all,
    table,
)

MOST_WAITING = 4096
"""Transfers to one peer that are not over; more are refused."""

_CONNECT_SECONDS = 5.0
_SILENCE_MS = 30_000
"""A connection whose bytes nobody acknowledges for this long is broken."""


class TcpTransfer:
    """See ``base.Transfer``."""

    def __init__(
        self, number: int, lease: Lease, region: RemoteRegion, spans: SpanBatch, notify: bytes, deadline: float
    ) -> None:
        self.number = number
        self.lease = lease
        self.region = region
        self.spans = spans
        self.notify = notify
        self.num_bytes = spans.num_bytes
        self.reason: str | None = None
        self.detail = ""
        self._deadline = deadline
        self._outcome = Outcome.PENDING
        self._quiesced = False
        self._lock = threading.Lock()

    def poll(self) -> Outcome:
        """See ``base.Transfer.poll``."""
        if self._outcome is Outcome.PENDING and time.monotonic() > self._deadline:
            self.settle(Outcome.FAILED, "deadline", f"{self.num_bytes} bytes were not there in time")
        return self._outcome

    @property
    def quiesced(self) -> bool:
        """See ``base.Transfer.quiesced``."""
        return self._quiesced

    def abort(self) -> None:
        """See ``base.Transfer.abort``."""
        self.settle(Outcome.FAILED, "aborted", "its owner gave it up")

    @property
    def is_over(self) -> bool:
        """It has an outcome, so that no byte more should be sent."""
        return self.poll() is not Outcome.PENDING

    def settle(self, outcome: Outcome, reason: str | None = None, detail: str = "") -> None:
        """Give it an outcome, unless it has one."""
        with self._lock:
            if self._outcome is Outcome.PENDING:
                self.reason, self.detail = reason, detail
                self._outcome = outcome

    def rest(self) -> None:
        """No byte of it is on its way any more."""
        with self._lock:
            if self._quiesced:
                return
            self._quiesced = True
        self.lease.leave(self)


class TcpPeer:
    """A peer, and the connection to it: one thread that sends and one that takes acknowledgements.

    Args:
        instance: who is connecting.
    """

    def __init__(self, instance: str, description: Description) -> None:
        self._sender = instance
        self.description = description
        self._alive = True
        self._closing = False
        self._condition = threading.Condition()
        self._waiting: collections.deque[TcpTransfer] = collections.deque()
        self._sent: dict[int, TcpTransfer] = {}
        self._threads: list[threading.Thread] = []

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

    def put(self, transfer: TcpTransfer) -> None:
        """Queue a transfer."""
        with self._condition:
            if len(self._waiting) + len(self._sent) >= MOST_WAITING:
                raise TransferError("engine", f"{MOST_WAITING} transfers to this peer are under way already")
            if self._closing:
                raise TransferError("closed", "the connection to this peer is closed")
            transfer.lease.use(transfer)
            self._waiting.append(transfer)
            if not self._threads:
                thread = threading.Thread(target=self._work, name="tcp transfer sender", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._condition.notify()

    def close(self) -> None:
        """End the connection; what is under way is lost."""
        with self._condition:
            self._closing = True
            self._condition.notify()

    def join(self, seconds: float) -> None:
        """Wait for the threads."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        """Connections, one after another: one ends when a transfer is given up in the middle of its bytes."""
        while self._next() is not None:
            try:
                with self._connect() as sock:
                    self._alive = self._converse(sock)
            except (Gone, OSError) as error:
                self._alive = False
                self._lose(f"the connection to {self._address} failed: {error}")
            else:
                self._lose(f"the connection to {self._address} was closed")
        self._lose("the connection was closed")

    @property
    def _address(self) -> str:
        return f"{self.description.host}:{self.description.port}"

    def _next(self, ended: threading.Event | None = None) -> TcpTransfer | None:
        """The next transfer that is not over, left in the queue; waits for it. None at the end, or the connection's."""
        with self._condition:
            while not self._closing and (ended is None or not ended.is_set()):
                while self._waiting and self._waiting[0].is_over:
                    self._waiting.popleft().rest()
                if self._waiting:
                    return self._waiting[0]
                self._condition.wait(1.0)
        return None

    def _connect(self) -> socket.socket:
        sock = socket.create_connection((self.description.host, self.description.port), timeout=_CONNECT_SECONDS)
        sock.settimeout(CALL_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)
        greeting = MAGIC + self._sender.encode() + self.instance.encode()
        send_all(sock, iter([memoryview(greeting)]), lambda: self._closing)
        self._alive = True
        return sock

    def _converse(self, sock: socket.socket) -> bool:
        """Send what is queued until the connection ends; what was sent is settled by the other thread.

        Returns:
            Whether this side ended it.
        """
        ended = threading.Event()
        acks = threading.Thread(target=self._take_acks, args=(sock, ended), name="tcp transfer acks", daemon=True)
        acks.start()
        try:
            while (transfer := self._next(ended)) is not None:
                with self._condition:
                    self._waiting.popleft()
                    self._sent[transfer.number] = transfer
                self._send(sock, transfer, ended)
        except Stopped:
            pass
        finally:
            is_ours = not ended.is_set()
            # The receiver reads to the end of what was sent, stops, and closes: then nothing of it is written any more.
            _shut_down(sock)
            while acks.is_alive():
                acks.join(CALL_SECONDS)
                if self._closing:
                    ended.set()
        return is_ours

    def _send(self, sock: socket.socket, transfer: TcpTransfer, ended: threading.Event) -> None:
        header = Header(
            transfer.number,
            transfer.region.region_id,
            transfer.region.generation,
            len(transfer.spans),
            len(transfer.notify),
        )
        head = header.encode() + transfer.notify + table(transfer.spans.dst_offset, transfer.spans.length)
        send_all(
            sock,
            itertools.chain([memoryview(head)], _sources(transfer)),
            lambda: ended.is_set() or self._closing or transfer.is_over,
        )

    def _take_acks(self, sock: socket.socket, ended: threading.Event) -> None:
        try:
            while True:
                number, verdict = ACK.unpack(receive_bytes(sock, ACK.size, ended.is_set))
                transfer = self._sent.pop(number, None)
                if transfer is None:
                    continue
                if verdict == ACCEPTED:
                    transfer.settle(Outcome.DONE)
                else:
                    transfer.settle(Outcome.FAILED, "rejected", "the peer has no such region or bytes any more")
                transfer.rest()
        except (Gone, Stopped):
            ended.set()
            with self._condition:
                self._condition.notify()

    def _lose(self, detail: str) -> None:
        """The connection is over, and the receiver is, or will be found, at the end of it."""
        with self._condition:
            lost = list(self._sent.values())
            self._sent.clear()
            if not self._alive or self._closing:
                lost += self._waiting
                self._waiting.clear()
        for transfer in lost:
            transfer.settle(Outcome.FAILED, "peer_lost", detail)
            transfer.rest()


def _sources(transfer: TcpTransfer) -> Iterator[memoryview]:
    whole = memory(transfer.lease.addr, transfer.lease.length)
    for offset, length in zip(transfer.spans.src_offset.tolist(), transfer.spans.length.tolist(), strict=True):
        yield whole[offset : offset + length]


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be broken already
        sock.shutdown(socket.SHUT_WR)
