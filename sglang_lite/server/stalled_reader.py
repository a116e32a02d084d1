"""Ending streams whose clients have stopped reading."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import termios

logger = logging.getLogger(__name__)

_LOOKS = 4
"""How often a connection is looked at within its time limit; a stall is noticed a quarter of the limit late at most."""


class StalledReaderWatch:
    """Closes a connection once its client has taken nothing for a while although there is something to take.

    A client that reads slowly is no stalled one: every byte that it takes starts the time anew. Closing the connection
    makes the write that waits fail, which ends the request and frees what it holds.

    Args:
        transport: of the connection.
        limit: seconds without a byte taken.
        path: of the request, for the log.
    """

    def __init__(self, transport: asyncio.Transport, limit: float, path: str) -> None:
        self._transport = transport
        self._limit = limit
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._taken_at = self._loop.time()
        self._seen: tuple[int, int, int] | None = None
        self.writes = 0
        """Writes begun so far; the stream counts them."""
        self.is_writing = False
        """Whether a write waits for the client; the stream says so."""
        self._timer = self._loop.call_later(limit / _LOOKS, self._look)

    def close(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        now = self._loop.time()
        seen = (self.writes, self._transport.get_write_buffer_size(), _unacknowledged(self._transport))
        if not self.is_writing or seen != self._seen:
            self._taken_at, self._seen = now, seen
        elif now - self._taken_at >= self._limit:
            logger.warning("the client of a stream of %s has read nothing for %g s: closed", self._path, self._limit)
            connection = self._transport.get_extra_info("socket")
            if connection is not None:
                # Reset it: the kernel would keep what the client does not take for minutes.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
            return
        self._timer = self._loop.call_later(self._limit / _LOOKS, self._look)


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes that the kernel holds because the client's has not taken them; 0 where it does not tell.

    The transport's own buffer is no measure for a slow client: the kernel takes more of it only once much of what it
    holds is gone, which may take minutes.
    """
    connection = transport.get_extra_info("socket")
    if connection is None:
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:
        return 0
