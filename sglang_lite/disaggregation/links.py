"""Connections to the workers of other servers, and whether their processes are alive."""

from __future__ import annotations

import asyncio
import contextlib
import enum

import zmq

MOST_QUEUED = 10_000
"""Messages to one peer that wait for its connection."""

PROBE_SECONDS = 0.3

MOST_UNUSED = 1024
"""Connections without a session that are kept: whoever reaches a port can ask for answers to many addresses."""


class Presence(enum.Enum):
    """What a look at a peer's port says."""

    LISTENS = 0
    GONE = 1
    UNKNOWN = 2


class Link:
    """One peer: a PUSH socket to it, and when it was last heard.

    Attributes:
        instance: who it is; another process at the same address is another link.
        users: sessions that depend on it; only then it is watched.
        last_heard: time of the loop; also when it got its first session.
        last_word: when it really was heard.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ip: str, port: int, instance: str) -> None:
        self.ip, self.port, self.instance = ip, port, instance
        self.users: set[int] = set()
        self.last_heard = self.last_word = 0.0
        self.is_probing = False
        self.is_lost = False
        self.is_gone = False
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, MOST_QUEUED)
        # After a network was away, TCP would try again ever more rarely: give the connection up and make another.
        # What was lost with it is sent again until it is confirmed.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, 1000)
        if ":" in ip:
            self._socket.setsockopt(zmq.IPV6, 1)
        host = f"[{ip}]" if ":" in ip else ip
        try:
            self._socket.connect(f"tcp://{host}:{port}")
        except zmq.ZMQError:
            self._socket.close(0)  # the context could not end while it is open
            raise

    @property
    def address(self) -> str:
        """For people."""
        return f"{self.ip}:{self.port}"

    def begin(self, user: int, now: float) -> None:
        """A session starts to depend on it, and gives it the usual time to be heard."""
        if not self.users or self.is_lost:
            self.last_heard, self.is_lost = now, False
        self.users.add(user)

    def send(self, frames: list[bytes]) -> bool:
        """Queue a message; False when its queue is full (the caller's timers try again), or the link is closed."""
        if self._socket.closed:
            return False
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            return True
        return False

    def close(self) -> None:
        """What is queued gets a moment."""
        self._socket.close()


class LinkTable:
    """All links of a worker, at most ``most`` of them; the longest unused goes first."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], most: int) -> None:
        self._context = context
        self._most = most
        self._links: dict[tuple[str, int, str], Link] = {}
        self._by_instance: dict[str, Link] = {}

    def get(self, ip: str, port: int, instance: str, now: float) -> Link:
        """The link to a peer.

        Raises:
            OSError: there are too many, all in use, or the address is none.
        """
        key = (ip, port, instance)
        link = self._links.pop(key, None)
        if link is not None and link.is_gone:
            link.close()
            link = None
        if link is None:
            self._make_room()
            try:
                link = Link(self._context, ip, port, instance)
            except zmq.ZMQError as error:
                raise OSError(f"cannot connect to {ip}:{port}: {error}") from error
            link.last_heard = link.last_word = now
        self._links[key] = link
        if instance:
            self._by_instance[instance] = link
        return link

    def others_at(self, link: Link) -> list[Link]:
        """Links to other processes with the same address."""
        if not link.instance:
            return []
        return [
            other
            for other in self._links.values()
            if other.address == link.address and other.instance not in ("", link.instance) and not other.is_gone
        ]

    def heard(self, instance: str, now: float) -> Link | None:
        """Note a sign of life."""
        link = self._by_instance.get(instance)
        if link is not None:
            link.last_heard = link.last_word = now
            link.is_lost = False
        return link

    def used(self) -> list[Link]:
        """Those with sessions."""
        return [link for link in self._links.values() if link.users]

    def close(self) -> None:
        """All of them."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._by_instance.clear()

    def _make_room(self) -> None:
        if len(self._links) < min(self._most, MOST_UNUSED):
            return
        for key, link in self._links.items():
            if not link.users:
                link.close()
                del self._links[key]
                if self._by_instance.get(link.instance) is link:
                    del self._by_instance[link.instance]
                return
        if len(self._links) >= self._most:
            raise OSError(f"{self._most} connections to peers are in use; raise SGLANG_DISAGGREGATION_ZMQ_MAX_SOCKETS")


def bind_inbox(inbox: zmq.Socket[bytes], host: str, ports: tuple[int, int] | None) -> int:
    """Bind a socket to a free port of ``host``, and say which one.

    Args:
        ports: first and last that may be taken; None for any.

    Raises:
        OSError: none of them is free.
    """
    address = f"[{host}]" if ":" in host else host
    if ":" in host:
        inbox.setsockopt(zmq.IPV6, 1)
    if ports is None:
        return int(inbox.bind_to_random_port(f"tcp://{address}"))
    for port in range(ports[0], ports[1] + 1):
        try:
            inbox.bind(f"tcp://{address}:{port}")
        except zmq.ZMQError:
            continue
        return port
    raise OSError(f"no port of {ports[0]}-{ports[1]} at {host} is free (--disaggregation-zmq-ports)")


async def look(ip: str, port: int) -> Presence:
    """Whether a process listens at a port. A stopped process does; one that was killed does not."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(ip, port)
    except ConnectionRefusedError:
        return Presence.GONE
    except (OSError, TimeoutError, UnicodeError):  # the last one: a name that no host can have
        return Presence.UNKNOWN
    writer.close()
    return Presence.LISTENS
