"""The sessions of a prefill worker, by key, by room and by what their decode ranks call them."""

from __future__ import annotations

from sglang_lite.disaggregation.prefill_state import Destination, PrefillSession
from sglang_lite.disaggregation.recent import Recent
from sglang_lite.disaggregation.states import State
from sglang_lite.disaggregation.waiting_rooms import Name

MOST_FINISHED = 1 << 14


class PrefillTable:
    """Live sessions and those that are over but whose pages are still read.

    Attributes:
        rooms, keys: live sessions.
        over: by key, in quarantine.
        finished: how sessions ended, by the name that a decode rank gave them.
        attempts: ends of a decode server's attempts, of which ranks may still tell.
    """

    def __init__(self) -> None:
        self.rooms: dict[int, PrefillSession] = {}
        self.keys: dict[int, PrefillSession] = {}
        self.over: dict[int, PrefillSession] = {}
        self.finished: Recent[Name, State] = Recent(MOST_FINISHED)
        self.attempts: Recent[Name, State] = Recent(MOST_FINISHED)
        self._names: dict[Name, tuple[PrefillSession, Destination]] = {}

    def open(self, session: PrefillSession) -> None:
        """A session begins."""
        self.rooms[session.params.room] = self.keys[session.key] = session

    def add(self, session: PrefillSession, destination: Destination) -> None:
        """One of its decode ranks is known."""
        session.destinations.append(destination)
        self._names[destination.name] = (session, destination)
        destination.decode.link.users.add(session.key)

    def find(self, name: Name) -> tuple[PrefillSession, Destination] | None:
        """The session of a name, live or in quarantine."""
        return self._names.get(name)

    def note(self, name: Name, attempt: Name, state: State) -> None:
        """Remember an end."""
        self.finished.put(name, state)
        self.attempts.put(attempt, state)

    def leave(self, session: PrefillSession) -> None:
        """It is over; its room may be used again."""
        self.keys.pop(session.key, None)
        self.rooms.pop(session.params.room, None)

    def forget(self, session: PrefillSession) -> None:
        """Nobody reads its pages any more, and late messages are answered from ``finished``."""
        self.over.pop(session.key, None)
        for destination in session.destinations:
            self._names.pop(destination.name, None)
            self.note(destination.name, destination.request.attempt, session.state)
            destination.decode.link.users.discard(session.key)
