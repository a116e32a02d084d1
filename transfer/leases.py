"""Registered regions, the same for every transport: overlap, location, generations, and who is using them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Self

import numpy as np

from sglang_lite.transfer.base import Int64Array, RegionBusy, RemoteRegion, SpanBatch, TransferError

_LOCATION = re.compile(r"(cpu|cuda|hip|musa|npu):\d+")
_MOST_ADDRESS = 1 << 64
_MOST_OFFSET = (1 << 63) - 1
"""Offsets are signed."""

_UNREACHABLE = re.compile(r"(metal|mps|xpu|hpu)\b")


def check_location(location: str, reachable: frozenset[str]) -> None:
    """Check a location label.

    Args:
        reachable: ``Capabilities.locations`` of the transport.

    Raises:
        TransferError: it is no label, or not reachable.
    """
    if _LOCATION.fullmatch(location) is None:
        what = "cannot be registered for transfers" if _UNREACHABLE.match(location) else "is no location"
        raise TransferError(
            "rejected",
            f"location {location!r} {what}; allowed are cpu:<numa>, cuda:<id>, hip:<id>, musa:<id>, npu:<id>",
        )
    kind = location.split(":")[0]
    if ("host" if kind == "cpu" else kind) not in reachable:
        raise TransferError(
            "rejected", f"this transport cannot reach memory at {location}; it reaches {', '.join(sorted(reachable))}"
        )


def check_remote(region: RemoteRegion) -> None:
    """Check what a peer says of a region, before an engine is given any of it.

    Raises:
        TransferError: there is no such memory.
    """
    if _LOCATION.fullmatch(region.location) is None:
        raise TransferError("rejected", f"a peer's region lies at {region.location[:40]!r}, which is no location")
    if region.addr < 0 or not 0 < region.length <= _MOST_ADDRESS - region.addr or region.length > _MOST_OFFSET:
        raise TransferError("rejected", f"a peer's region of {region.length} bytes at {region.addr} cannot be")


class Lease:
    """See ``base.RegionLease``. ``RegionTable`` makes them."""

    def __init__(
        self, region_id: int, generation: int, addr: int, length: int, location: str, release: Callable[[Lease], None]
    ) -> None:
        self.region_id = region_id
        self.generation = generation
        self.addr = addr
        self.length = length
        self.location = location
        self.is_open = True
        self._release = release
        self._users: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def use(self, user: object) -> None:
        """A transfer starts to use the region."""
        self._users.add(id(user))

    def leave(self, user: object) -> None:
        """It is quiesced."""
        self._users.discard(id(user))

    @property
    def num_users(self) -> int:
        """Transfers that are not quiesced."""
        return len(self._users)

    def close(self) -> None:
        """See ``base.RegionLease.close``."""
        if not self.is_open:
            return
        if self._users:
            raise RegionBusy(
                f"region {self.region_id} is used by {len(self._users)} transfers that are not quiesced; abort them "
                f"and wait before its memory goes"
            )
        self._release(self)
        self.is_open = False

    def remote(self, fence: int) -> RemoteRegion:
        """How a peer sees it that was last shut out at generation ``fence`` (0 for never)."""
        generation = max(self.generation, fence)
        return RemoteRegion(self.region_id, generation, self.addr, self.length, self.location)


class RegionTable:
    """The regions of one transport.

    Args:
        reachable: ``Capabilities.locations``.
        register, unregister: tell the engine.
    """

    def __init__(
        self,
        reachable: frozenset[str],
        register: Callable[[Lease], None] = lambda lease: None,
        unregister: Callable[[Lease], None] = lambda lease: None,
    ) -> None:
        self._reachable = reachable
        self._register = register
        self._unregister = unregister
        self._leases: dict[int, Lease] = {}
        self._ids = itertools.count(1)

    def open(self, addr: int, length: int, location: str) -> Lease:
        """See ``base.KVTransport.register``."""
        if length < 1:
            raise TransferError("rejected", f"a region of {length} bytes cannot be registered; it needs at least 1")
        check_location(location, self._reachable)
        for other in self._leases.values():
            if addr < other.addr + other.length and other.addr < addr + length:
                raise TransferError(
                    "rejected",
                    f"[{addr:#x}, {addr + length:#x}) overlaps region {other.region_id}; memory is registered once",
                )
        number = next(self._ids)
        lease = Lease(number, number, addr, length, location, self._forget)
        self._register(lease)
        self._leases[number] = lease
        return lease

    def find(self, region_id: int, generation: int, fence: int) -> Lease | None:
        """The open region with that id and generation, for a peer that was last shut out at ``fence``."""
        lease = self._leases.get(region_id)
        return lease if lease is not None and max(lease.generation, fence) == generation else None

    def next_generation(self) -> int:
        """Above all that were given out."""
        return next(self._ids)

    def open_leases(self) -> list[Lease]:
        """All of them."""
        return list(self._leases.values())

    def remote(self, fence: int = 0) -> list[RemoteRegion]:
        """How a peer sees them that was last shut out at generation ``fence``."""
        return [lease.remote(fence) for lease in self._leases.values()]

    def _forget(self, lease: Lease) -> None:
        self._unregister(lease)
        self._leases.pop(lease.region_id, None)


def check_spans(spans: SpanBatch, src_length: int, dst_length: int) -> None:
    """Check that spans lie within their regions.

    Raises:
        TransferError: names the first one that does not.
    """
    for side, offsets, extent in (("source", spans.src_offset, src_length), ("target", spans.dst_offset, dst_length)):
        wrong = outside(offsets, spans.length, extent)
        if len(wrong):
            first = int(wrong[0])
            start = int(offsets[first])
            stop = start + int(spans.length[first])
            raise TransferError(
                "rejected", f"span {first}: {side} bytes [{start}, {stop}) are outside the region of {extent} bytes"
            )


def outside(offsets: Int64Array, lengths: Int64Array, extent: int) -> Int64Array:
    """int64[k]: the spans that do not lie within [0, extent)."""
    # Compared without a sum, which could overflow.
    return np.flatnonzero((offsets < 0) | (lengths < 1) | (offsets > extent) | (lengths > extent - offsets))
