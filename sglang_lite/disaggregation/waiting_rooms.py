"""What a prefill worker remembers of rooms without a session: requests that came early, and ends not long ago."""

from __future__ import annotations

from sglang_lite.disaggregation.frames import Request
from sglang_lite.disaggregation.recent import Recent

Name = tuple[str, int, int]
"""(instance of the decode worker, room, generation)."""

MOST_ROOMS = 1 << 14
MOST_RANKS = 64
REOPEN_SECONDS = 0.5
"""For how long one side waits for the other to use a room again that has just ended without it."""

NOTE_SECONDS = 10.0
"""For how long such an end is remembered."""


class WaitingRooms:
    """Early requests of decode ranks by room, and why rooms ended.

    Args:
        patience: seconds that a request waits for its room to be opened.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._early: Recent[int, dict[Name, tuple[Request, float]]] = Recent(MOST_ROOMS)
        self._failed: Recent[int, tuple[str, float]] = Recent(MOST_ROOMS)
        self._aborted: Recent[int, tuple[str, float]] = Recent(MOST_ROOMS)

    def put(self, name: Name, request: Request, now: float) -> None:
        """A request came before its room was opened here; if the room has just failed, it waits for a moment only."""
        early = self._early.get(request.room)
        if early is None:
            early = {}
            self._early.put(request.room, early)
        patience = REOPEN_SECONDS if self._why(self._failed, request.room, now) else self._patience
        if len(early) < MOST_RANKS:
            early.setdefault(name, (request, now + patience))

    def open(self, room: int, now: float) -> tuple[list[Request], str]:
        """A room is opened: the requests that wait for it, and why its decode side has just ended it, or ""."""
        why = self._why(self._aborted, room, now)
        self._aborted.pop(room)
        self._failed.pop(room)
        early = self._early.pop(room) or {}
        return [request for request, _ in early.values()], why

    def drop(self, name: Name) -> None:
        """A request was given up."""
        early = self._early.get(name[1])
        if early is not None:
            early.pop(name, None)

    def refuse(self, room: int, why: str, now: float) -> None:
        """A room is not opened here: those that wait for it hear why, unless it is used for another request at once."""
        self.note_failed(room, why, now)
        early = self._early.get(room) or {}
        for name, (request, until) in early.items():
            early[name] = request, min(until, now + REOPEN_SECONDS)

    def note_failed(self, room: int, why: str, now: float) -> None:
        """The session of a room failed here."""
        self._failed.put(room, (why, now))

    def note_aborted(self, room: int, why: str, now: float) -> None:
        """The decode side ended a room before it was opened here."""
        self._aborted.put(room, (why, now))

    def expire(self, now: float) -> list[tuple[Name, Request, str]]:
        """Requests that waited long enough, and why nobody opened their room."""
        expired = []
        for room, early in self._early.items():
            for name, (request, until) in list(early.items()):
                if now > until:
                    del early[name]
                    why = self._why(self._failed, room, now) or "the prefill server never got a request with this room"
                    expired.append((name, request, why))
            if not early:
                self._early.pop(room)
        return expired

    def _why(self, notes: Recent[int, tuple[str, float]], room: int, now: float) -> str:
        note = notes.get(room)
        return note[0] if note is not None and now - note[1] < NOTE_SECONDS else ""
