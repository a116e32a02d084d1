"""The interface of every transport: registered memory, spans between two pools, outcomes.

Two questions about a transfer are kept apart. Its *outcome* says whether the bytes are all there. *Quiesced* says that
no byte of it will be read or written any more: only then may its pages be used for something else. A transfer that
failed, or that its owner gave up, need not be quiet; neither engine below can call back bytes that it has handed to a
network.

Destinations are named by region and offset, never by address, and every adapter checks range, generation and location
before an engine sees a span.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

HOST = "cpu:0"
"""Location of memory that is the host's, whichever of its NUMA nodes it is on."""


class TransferError(Exception):
    """Something about a transfer that its caller can handle.

    Attributes:
        reason: one of ``REASONS``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


REASONS = ("peer_lost", "rejected", "deadline", "aborted", "engine", "closed", "corrupt")
"""Why transfers fail: the peer is gone, it refused a span, time is up, the owner gave up, the engine reported an error,
the transport was closed, the bytes are not those that were sent."""


class RegionBusy(TransferError):
    """A region cannot be unregistered while a transfer that uses it is not quiesced."""

    def __init__(self, message: str) -> None:
        super().__init__("engine", message)


class Outcome(enum.Enum):
    """How a transfer stands."""

    PENDING = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport does, here and now.

    Attributes:
        engine, version: what runs.
        protocol: what carries the bytes, not what was asked for.
        locations: kinds of memory: {"host"} or {"host", "cuda"}.
        native_notify: notifications travel with the transfer; else the adapter sends them behind it.
        cancel_stops_bytes: an abort stops bytes that are under way.
        target_checks_range: the receiving side refuses what lies outside its regions.
        max_inflight_spans: spans under way to one peer; more wait in the adapter.
    """

    engine: str
    version: str
    protocol: str
    locations: frozenset[str]
    native_notify: bool
    cancel_stops_bytes: bool
    target_checks_range: bool
    max_inflight_spans: int


class RemoteRegion(msgspec.Struct, frozen=True, array_like=True):
    """A region of a peer as its description told it."""

    region_id: int
    generation: int
    addr: int
    length: int
    location: str


class Description(msgspec.Struct, frozen=True, array_like=True):
    """What ``KVTransport.describe`` encodes: who a transport is, and its regions.

    Attributes:
        engine, version: of the transport; both sides must be the same engine.
        instance: new for every transport that is opened; addresses may be those of an earlier one.
        host, port: where its control socket listens; port 0 without one.
        session: what the engine itself needs to find this side.
        regions: those registered now.
    """

    engine: str
    version: str
    instance: str
    host: str
    port: int
    session: bytes
    regions: list[RemoteRegion]


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """n spans of bytes, from a region here to a region there.

    Attributes:
        src_offset, dst_offset: int64[n], from the start of the regions.
        length: int64[n], bytes of each, at least 1.
    """

    src_offset: Int64Array
    dst_offset: Int64Array
    length: Int64Array

    def __post_init__(self) -> None:
        """Raises TransferError: the arrays do not fit together."""
        count = len(self.length)
        if len(self.src_offset) != count or len(self.dst_offset) != count:
            raise TransferError(
                "rejected",
                f"{len(self.src_offset)} source offsets, {len(self.dst_offset)} target offsets and {count} lengths: "
                f"one of each is needed for every span",
            )
        if count and int(self.length.min()) < 1:
            raise TransferError("rejected", f"span {int(self.length.argmin())} has {int(self.length.min())} bytes")

    def __len__(self) -> int:
        return len(self.length)

    @property
    def num_bytes(self) -> int:
        """Bytes of all spans."""
        return int(self.length.sum())


class RegionLease(Protocol):
    """Registered memory. A context manager; the memory must outlive it."""

    @property
    def region_id(self) -> int: ...

    @property
    def generation(self) -> int:
        """Grows with every registration, so that what an old description says is not mistaken for this one."""

    @property
    def addr(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def location(self) -> str: ...

    def close(self) -> None:
        """Unregister; may be called again.

        Raises:
            RegionBusy: a transfer that uses it is not quiesced.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


class Transfer(Protocol):
    """One batch of spans under way."""

    def poll(self) -> Outcome:
        """How it stands; never blocks. Once DONE or FAILED it stays that."""

    @property
    def reason(self) -> str | None:
        """One of ``REASONS`` once it failed."""

    @property
    def detail(self) -> str:
        """What happened, for people; empty while it did not fail."""

    @property
    def quiesced(self) -> bool:
        """No byte of it is read or written any more. Polls what has to be polled; never blocks."""

    @property
    def num_bytes(self) -> int: ...

    def abort(self) -> None:
        """FAILED with "aborted" now, unless it is over; quiesced perhaps later."""


class Peer(Protocol):
    """The other end of a connection."""

    @property
    def instance(self) -> str:
        """Who it is (``Description.instance``)."""

    @property
    def regions(self) -> Sequence[RemoteRegion]: ...

    @property
    def alive(self) -> bool:
        """False once it is known to be gone; true says little."""


class Fence(Protocol):
    """Shuts a sender out; see ``KVTransport.fence``."""

    @property
    def quiesced(self) -> bool:
        """No byte of what was submitted before the fence can land any more. Never blocks."""


class KVTransport(Protocol):
    """Moves spans of registered memory. Used by one thread, except where said."""

    @property
    def instance(self) -> str: ...

    def capabilities(self) -> Capabilities: ...

    def register(self, addr: int, length: int, location: str = HOST) -> RegionLease:
        """Make memory reachable for transfers.

        Args:
            addr, length: bytes [addr, addr + length) of this process, which stay mapped until the lease is closed.
            location: ``cpu:<numa>``, ``cuda:<id>``, ``hip:<id>``, ``musa:<id>`` or ``npu:<id>``.

        Raises:
            TransferError: it overlaps a registered region, is empty, or lies where this transport cannot reach.
        """

    def describe(self, reader: str = "") -> bytes:
        """A ``Description``, msgpack; send it to the peer, which passes it to ``connect``.

        Args:
            reader: instance of that peer, where it may have been fenced off.
        """

    def fence(self, sender: str) -> Fence | None:
        """Refuse what a sender submits with all that it was told until now; another ``describe`` lets it in again.

        Args:
            sender: its instance.

        Returns:
            None: the receiving side of this transport has no say in what is written.
        """

    def connect(self, description: bytes) -> Peer:
        """Know a peer. The same instance again refreshes what is known of its regions.

        Raises:
            TransferError: the description is malformed or of another engine.
        """

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer; transfers to it end as ``peer_lost``."""

    def submit(
        self, peer: Peer, src: RegionLease, dst: RemoteRegion, spans: SpanBatch, *, notify: bytes, deadline_s: float
    ) -> Transfer:
        """Write spans into a peer's region.

        Args:
            notify: what the peer gets by ``notifications`` once all of it has arrived; empty for nothing.
            deadline_s: seconds from now after which it has failed.

        Raises:
            TransferError: "rejected" when a span or a region is not what it should be.
        """

    def notifications(self) -> list[tuple[str, bytes]]:
        """(instance of the sender, what it sent), in the order of arrival; each is told once."""

    def close(self, grace_s: float) -> None:
        """End transfers, unregister regions, free the engine. Waits at most ``grace_s`` for what is not quiesced."""
