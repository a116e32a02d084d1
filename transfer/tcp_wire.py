"""Frames of the ``tcp`` transport and the memory they are read from and written to.

One connection goes from a sender to a receiver. It opens with a greeting; then come transfers, each a header, a table
of spans and the spans' bytes; one acknowledgement goes back for each of them. All integers are little-endian.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sglang_lite.transfer.base import Int64Array

MAGIC = b"SGLT1\0\0\0"
INSTANCE_BYTES = 32
GREETING_BYTES = len(MAGIC) + 2 * INSTANCE_BYTES
"""Magic, the sender's instance, the instance it wants to reach."""

HEADER = struct.Struct("<QQQII")
"""Transfer, region, generation, number of spans, bytes of the notification."""

ACK = struct.Struct("<QB7x")
"""Transfer, ``ACCEPTED`` or ``REFUSED``."""

ACCEPTED, REFUSED = 0, 1

MAX_SPANS = 1 << 16
"""Spans of one transfer."""

MAX_NOTIFY = 1 << 20
"""Bytes of one notification."""

MOST_VIEWS = 512
"""Pieces of memory in one call; the kernel takes 1,024."""

CALL_SECONDS = 0.1
"""A call that waits for the network looks up this often."""


class Stopped(Exception):
    """Somebody wants the connection to end."""


class Gone(Exception):
    """The other end closed the connection, or it broke."""


def memory(addr: int, length: int) -> memoryview:
    """The bytes [addr, addr + length) of this process, which the caller keeps mapped."""
    return memoryview((ctypes.c_char * length).from_address(addr)).cast("B")


@dataclass(frozen=True, slots=True)
class Header:
    """Of one transfer."""

    transfer: int
    region_id: int
    generation: int
    num_spans: int
    notify_bytes: int

    def encode(self) -> bytes:
        """``HEADER``."""
        return HEADER.pack(self.transfer, self.region_id, self.generation, self.num_spans, self.notify_bytes)

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Header:
        """Raises Gone: no sender of ours would say that."""
        header = cls(*HEADER.unpack(data))
        if header.num_spans > MAX_SPANS or header.notify_bytes > MAX_NOTIFY:
            raise Gone(f"{header.num_spans} spans and {header.notify_bytes} bytes of notification are too many")
        return header


def table(offsets: Int64Array, lengths: Int64Array) -> bytes:
    """int64[n, 2]: target offset and length of each span."""
    return np.stack((offsets, lengths), axis=1).astype("<i8").tobytes()


def send_all(sock: socket.socket, views: Iterator[memoryview], stopped: Callable[[], bool]) -> None:
    """Send pieces of memory one after another.

    Raises:
        Stopped: ``stopped`` said so.
        Gone: the connection is broken.
    """
    waiting: list[memoryview] = []
    more = True
    while True:
        while more and len(waiting) < MOST_VIEWS:
            view = next(views, None)
            if view is None:
                more = False
            elif len(view):
                waiting.append(view)
        if not waiting:
            return
        if stopped():
            raise Stopped
        try:
            sent = sock.sendmsg(waiting)
        except TimeoutError:
            continue
        except OSError as error:
            raise Gone(str(error)) from error
        waiting = _rest(waiting, sent)


def receive_all(sock: socket.socket, views: Iterator[memoryview], stopped: Callable[[], bool]) -> None:
    """Fill pieces of memory one after another; errors as ``send_all``."""
    waiting: list[memoryview] = []
    more = True
    while True:
        while more and len(waiting) < MOST_VIEWS:
            view = next(views, None)
            if view is None:
                more = False
            elif len(view):
                waiting.append(view)
        if not waiting:
            return
        if stopped():
            raise Stopped
        try:
            got = sock.recvmsg_into(waiting)[0]
        except TimeoutError:
            continue
        except OSError as error:
            raise Gone(str(error)) from error
        if not got:
            raise Gone("the other end closed the connection")
        waiting = _rest(waiting, got)


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of ``views`` behind their first ``done`` bytes."""
    for index, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[index + 1 :]]
        done -= len(view)
    return []


def receive_bytes(sock: socket.socket, count: int, stopped: Callable[[], bool]) -> bytearray:
    """The next ``count`` bytes."""
    data = bytearray(count)
    receive_all(sock, iter([memoryview(data)]), stopped)
    return data
