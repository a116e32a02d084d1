"""One event about a request out of those of all ranks: it stands as the rank stands that is least far."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

from sglang_lite.disaggregation.base import (
    Event,
    FirstToken,
    KVArrived,
    KVFailed,
    KVQuiesced,
    KVSent,
    PeerReady,
    PrefillLost,
)


@dataclass(slots=True)
class _Request:
    """What the ranks have said; sets of ranks.

    Attributes:
        is_over: it failed, or the core gave it up; nothing but ``KVQuiesced`` follows.
        first: the record, of the lowest rank that has it.
    """

    ready: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    quiet: set[int] = field(default_factory=set)
    is_over: bool = False
    first: FirstToken | None = None


class RankMerge:
    """The requests of a replica with several ranks. Pure: says what to tell the core and which ranks to stop.

    Args:
        size: number of ranks.

    Attributes:
        failures: reason -> requests that failed with it.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._requests: dict[int, _Request] = {}
        self.failures: collections.Counter[str] = collections.Counter()

    @property
    def num_quarantined(self) -> int:
        """Requests that are over while a rank's pages may still be touched."""
        return sum(request.is_over for request in list(self._requests.values()))

    def open(self, key: int) -> None:
        """A request begins on all ranks."""
        self._requests[key] = _Request()

    def abort(self, key: int) -> bool:
        """The core gives a request up. Whether the ranks have to be told; else nothing of it is left."""
        request = self._requests.get(key)
        if request is None or request.is_over:
            return False
        request.is_over = True
        self.failures["aborted"] += 1
        return True

    def is_known(self, key: int) -> bool:
        """Something of it is left, and an event will end it."""
        return key in self._requests

    def take(self, rank: int, event: Event) -> tuple[list[Event], bool]:
        """Take what a rank says.

        Returns:
            What to tell the core, and whether to end the request on all ranks.
        """
        if isinstance(event, PrefillLost):
            return [event] if rank == 0 else [], False  # all ranks ask the same bootstrap server
        request = self._requests.get(event.key)
        if request is None:
            return [], False  # the answer to an abort that crossed its end
        match event:
            case PeerReady():
                return self._ready(request, rank, event), False
            case KVSent():
                return self._done(request, rank, event), False
            case KVArrived():
                if request.first is None or rank == 0:
                    request.first = event.first
                return self._done(request, rank, event), False
            case KVFailed():
                return self._failed(request, rank, event)
            case KVQuiesced():
                request.quiet.add(rank)
                return self._rest(request, event.key), False

    def _ready(self, request: _Request, rank: int, event: PeerReady) -> list[Event]:
        request.ready[rank] = event.decode_prefix_len
        if request.is_over or len(request.ready) < self._size:
            return []
        return [PeerReady(event.key, min(request.ready.values()))]

    def _done(self, request: _Request, rank: int, event: KVSent | KVArrived) -> list[Event]:
        request.done.add(rank)
        request.quiet.add(rank)
        if request.is_over:
            return self._rest(request, event.key)
        if len(request.done) < self._size:
            return []
        del self._requests[event.key]
        return [KVSent(event.key) if request.first is None else KVArrived(event.key, request.first)]

    def _failed(self, request: _Request, rank: int, event: KVFailed) -> tuple[list[Event], bool]:
        if event.quiesced:
            request.quiet.add(rank)
        if request.is_over:
            return self._rest(request, event.key), False
        request.is_over = True
        self.failures[event.reason] += 1
        quiesced = len(request.quiet) == self._size
        if quiesced:
            del self._requests[event.key]
        return [KVFailed(event.key, event.status, event.message, quiesced, event.reason)], not quiesced

    def _rest(self, request: _Request, key: int) -> list[Event]:
        if not request.is_over or len(request.quiet) < self._size:
            return []
        del self._requests[key]
        return [KVQuiesced(key)]
