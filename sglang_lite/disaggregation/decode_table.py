"""The sessions of a decode worker, by key, by room and by generation."""

from __future__ import annotations

import itertools
import secrets

from sglang_lite.disaggregation.decode_state import DecodeSession
from sglang_lite.disaggregation.recent import Recent

MOST_FINISHED = 1 << 14
_RANDOM_BITS = 60


class DecodeTable:
    """Live sessions and those that are over but whose pages may still be written.

    Attributes:
        rooms, keys: live sessions.
        over: by key, in quarantine; keys below 0 are of requests that were never opened.
        generations: both.
        finished: what was wrong with arrived sessions ("" for nothing), by generation.
        registered: instances of prefill ranks that know this process and its pool.
    """

    def __init__(self, most_registered: int) -> None:
        self._most_registered = most_registered
        self.registered: set[str] = set()
        self.rooms: dict[int, DecodeSession] = {}
        self.keys: dict[int, DecodeSession] = {}
        self.over: dict[int, DecodeSession] = {}
        self.generations: dict[int, DecodeSession] = {}
        self.finished: Recent[int, str] = Recent(MOST_FINISHED)
        # What is still said to the process that had this address before must not mean a session of this one.
        self._numbers = itertools.count(1 + secrets.randbits(_RANDOM_BITS))

    def next_generation(self) -> int:
        """A number that no session had, of this process or of one before it at its address."""
        return next(self._numbers)

    def note_registered(self, instance: str) -> None:
        """A prefill rank was told."""
        if len(self.registered) >= self._most_registered:
            self.registered.clear()  # they are told again
        self.registered.add(instance)

    def open(self, session: DecodeSession) -> None:
        """A session begins."""
        self.rooms[session.params.room] = self.keys[session.key] = self.generations[session.generation] = session

    def quarantine(self, session: DecodeSession) -> None:
        """It is over, but its pages may still be written. Its room may be used again."""
        self._leave(session)
        self.over[session.key] = self.generations[session.generation] = session

    def forget(self, session: DecodeSession) -> None:
        """Nobody writes its pages any more."""
        self._leave(session)
        self.over.pop(session.key, None)
        self.generations.pop(session.generation, None)
        for source in session.sources:
            source.link.users.discard(session.key)

    def _leave(self, session: DecodeSession) -> None:
        self.keys.pop(session.key, None)
        if self.rooms.get(session.params.room) is session:
            del self.rooms[session.params.room]
