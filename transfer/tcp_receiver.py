"""The receiving half of the ``tcp`` transport: it checks every span, and it alone writes into the regions."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from sglang_lite.transfer.base import Int64Array
from sglang_lite.transfer.leases import Lease, outside
from sglang_lite.transfer.tcp_wire import (
    ACCEPTED,
    ACK,
    CALL_SECONDS,
    GREETING_BYTES,
    HEADER,
    INSTANCE_BYTES,
    MAGIC,
    REFUSED,
    Gone,
    Header,
    Stopped,
    memory,
    receive_all,
    receive_bytes,
    send_all,
)

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS = 1024
_SCRATCH_BYTES = 1 << 18
_GREETING_SECONDS = 5.0


class _Connection:
    """One sender's connection, and the thread that serves it."""

    def __init__(self, sock: socket.socket, ends: threading.Event) -> None:
        self.sock = sock
        self.sender = ""
        self.thread: threading.Thread | None = None
        self.is_expelled = False
        self._ends = ends

    def is_ending(self) -> bool:
        """Nothing more is to be read from it."""
        return self.is_expelled or self._ends.is_set()


class Expulsion:
    """See ``base.Fence``."""

    def __init__(self, threads: list[threading.Thread]) -> None:
        self._threads = threads

    @property
    def quiesced(self) -> bool:
        """See ``base.Fence.quiesced``."""
        return not any(thread.is_alive() for thread in self._threads)


class Receiver:
    """Listens, and writes what peers send into open regions.

    Args:
        host: address to listen at.
        instance: who this is; a sender that looks for somebody else is sent away.
        acquire: (sender, region, generation, user) -> the open lease, in use by that user until it leaves, or None.
        release: the user leaves the lease.
        deliver: takes (instance of the sender, notification) of a transfer that has arrived.
    """

    def __init__(
        self,
        host: str,
        instance: str,
        acquire: Callable[[str, int, int, object], Lease | None],
        release: Callable[[Lease, object], None],
        deliver: Callable[[str, bytes], None],
    ) -> None:
        self._instance = instance
        self._acquire = acquire
        self._release = release
        self._deliver = deliver
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[_Connection, None] = {}  # in the order of their arrival
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener.settimeout(CALL_SECONDS)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, name="tcp transfer listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop writing, close every connection and wait for their threads."""
        self._closing.set()
        self._thread.join()
        with self._lock:
            threads = [connection.thread for connection in self._connections]
        for thread in threads:
            if thread is not None:
                thread.join()

    def expel(self, sender: str) -> Expulsion:
        """End the connections of a sender. What it submits over another one is checked as ever."""
        with self._lock:
            connections = [connection for connection in self._connections if connection.sender == sender]
            for connection in connections:
                connection.is_expelled = True
        return Expulsion([connection.thread for connection in connections if connection.thread is not None])

    def _listen(self) -> None:
        with self._listener:
            while not self._closing.is_set():
                try:
                    sock, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # out of descriptors, for example: what is connected goes on
                    logger.warning("tcp transfer: accept failed: %s", error)
                    self._closing.wait(CALL_SECONDS)
                    continue
                self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        """Serve a connection. Where there are too many, one that has not said yet who it is gives way."""
        connection = _Connection(sock, self._closing)
        thread = threading.Thread(target=self._serve, args=(connection,), name="tcp transfer receiver", daemon=True)
        connection.thread = thread
        with self._lock:
            if len(self._connections) >= _MOST_CONNECTIONS and not self._expel_a_stranger():
                sock.close()
                return
            try:
                thread.start()
            except RuntimeError as error:  # no more threads: what is connected goes on
                logger.warning("tcp transfer: a connection cannot be served: %s", error)
                sock.close()
                return
            self._connections[connection] = None

    def _expel_a_stranger(self) -> bool:
        """End the oldest connection without a greeting; whether there is one. Peers greet at once."""
        stranger = next((connection for connection in self._connections if not connection.sender), None)
        if stranger is None:
            return False
        stranger.is_expelled = True
        del self._connections[stranger]
        with contextlib.suppress(OSError):  # it may be broken already
            stranger.sock.shutdown(socket.SHUT_RDWR)
        return True

    def _serve(self, connection: _Connection) -> None:
        sock = connection.sock
        try:
            with sock:
                sock.settimeout(_GREETING_SECONDS)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sender = self._greet(sock)
                if sender is not None:
                    with self._lock:
                        if connection.is_expelled:
                            return
                        connection.sender = sender
                    sock.settimeout(CALL_SECONDS)
                    while True:
                        self._receive(connection)
        except (Gone, Stopped):
            pass  # the sender hears of it by the end of the connection
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    def _greet(self, sock: socket.socket) -> str | None:
        """The instance of the sender; None when it means somebody else. Ends a connection that says nothing."""
        data = bytearray()
        until = time.monotonic() + _GREETING_SECONDS
        while len(data) < GREETING_BYTES:
            if time.monotonic() > until:
                raise Gone("the greeting took too long")
            try:
                got = sock.recv(GREETING_BYTES - len(data))
            except OSError as error:
                raise Gone(str(error)) from error
            if not got:
                raise Gone("the connection ended before its greeting")
            data += got
        wanted = bytes(data[len(MAGIC) + INSTANCE_BYTES :])
        if not data.startswith(MAGIC) or wanted != self._instance.encode():
            return None
        return bytes(data[len(MAGIC) : len(MAGIC) + INSTANCE_BYTES]).decode("ascii", "replace")

    def _receive(self, connection: _Connection) -> None:
        """One transfer. Its bytes are read whatever is wrong with it, so that the next one can follow."""
        sock, sender, is_ending = connection.sock, connection.sender, connection.is_ending
        header = Header.decode(receive_bytes(sock, HEADER.size, is_ending))
        notify = bytes(receive_bytes(sock, header.notify_bytes, is_ending))
        raw = receive_bytes(sock, 16 * header.num_spans, is_ending)
        spans: Int64Array = np.frombuffer(raw, dtype="<i8").reshape(-1, 2).astype(np.int64)
        if len(spans) and int(spans[:, 1].min()) < 1:
            raise Gone("a span without bytes")
        user = object()
        lease = self._acquire(sender, header.region_id, header.generation, user)
        try:
            accepted = lease is not None and not len(outside(spans[:, 0], spans[:, 1], lease.length))
            if accepted and lease is not None:
                receive_all(sock, _targets(lease, spans), is_ending)
            else:
                receive_all(sock, _nowhere(spans), is_ending)
        finally:
            if lease is not None:
                self._release(lease, user)
        if accepted and notify:
            self._deliver(sender, notify)
        answer = ACK.pack(header.transfer, ACCEPTED if accepted else REFUSED)
        send_all(sock, iter([memoryview(answer)]), is_ending)


def _targets(lease: Lease, spans: Int64Array) -> Iterator[memoryview]:
    whole = memory(lease.addr, lease.length)
    for offset, length in spans.tolist():
        yield whole[offset : offset + length]


def _nowhere(spans: Int64Array) -> Iterator[memoryview]:
    """Scratch memory, as often as it takes."""
    scratch = memoryview(bytearray(_SCRATCH_BYTES))
    for length in spans[:, 1].tolist():
        while length > 0:
            yield scratch[: min(length, _SCRATCH_BYTES)]
            length -= _SCRATCH_BYTES
