"""Sessions: conversations whose tokens the front keeps, so that requests name what they continue and send what is new.

A session is a tree of turns, one a request. A turn keeps only what it added: how many tokens of its parent it takes
over, its own input, and its output. Nothing of the engine belongs to a session: the prefix cache finds the beginning
of a continued conversation as it finds any other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

import numpy as np

from sglang_lite.frontend.request_limits import LIMITS, RequestLimits
from sglang_lite.frontend.session import (
    CountCharacters,
    Session,
    SessionParams,
    Turn,
    check_capacity,
    kept_tokens,
    last_of_streaming,
)
from sglang_lite.types import Int32Array, RequestError


class SessionStore:
    """The sessions of one front. Whatever it does, it first drops the sessions whose time is over.

    Args:
        limits: how many sessions there may be, what they may hold, and how long one may lie idle.
        clock: seconds on any monotonic clock.

    Attributes:
        num_bytes: of all turns.
    """

    def __init__(self, limits: RequestLimits = LIMITS, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.num_bytes = 0
        self._limits = limits
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self, name: str | None, *, capacity: int = 0, streaming: bool = False, timeout: float | None = None
    ) -> str:
        """Open a session; returns its id.

        Args:
            name: the id that the client chose, None for a new one.
            timeout: seconds; None for the longest there is.

        Raises:
            RequestError: 400, a session of that id is open; 429, there are too many.
        """
        self.expire()
        if name is None:
            name = secrets.token_hex(16)
        if name in self._sessions:
            raise RequestError(
                f"Failed to open the session: the session {name[:100]!r} is still open; close it first.",
                field="session_id",
            )
        if len(self._sessions) >= self._limits.sessions:
            raise RequestError(
                f"{len(self._sessions)} sessions are open, as many as there may be; close some, or open sessions "
                "with a timeout",
                status=429,
            )
        longest = self._limits.session_seconds
        seconds = longest if timeout is None else min(timeout, longest)
        self._sessions[name] = Session(self, name, capacity, streaming, seconds, self.clock())
        return name

    def close(self, name: str) -> bool:
        """Close a session; whether there was one. Requests that run go on."""
        self.expire()
        session = self._sessions.pop(name, None)
        if session is not None:
            session.clear()
        return session is not None

    def expire(self) -> int:
        """Close the sessions that nobody used in time; how many there were."""
        now = self.clock()
        idle = [one for one in self._sessions.values() if not one.running and now - one.used_at > one.timeout]
        for session in idle:
            del self._sessions[session.name]
            session.clear()
        return len(idle)

    def to_abort(self, params: SessionParams) -> list[Turn]:
        """The turns that run and that ``begin`` would drop, or cut, with ``replace``.

        Raises:
            RequestError: as ``begin``.
        """
        session = self._session(params)
        if not params.replace:
            return []
        if params.rid is None:
            gone = list(session.turns.values())
        else:
            gone = session.descendants([self._turn(session, params.rid)])
        return [turn for turn in gone if not turn.ended.is_set()]

    def begin(
        self,
        request_id: str,
        params: SessionParams,
        tokens: Sequence[int],
        text: str | None,
        count: CountCharacters,
        *,
        begin_token: int | None = None,
    ) -> Turn:
        """Add a request to a session. Its input is ``turn.history(turn.input_length)``; the caller sees to its end.

        Args:
            tokens: the new input; text: what it was made of, None for input that came as tokens.
            count: for such input, and for a history that is cut.
            begin_token: left out at the head of input that continues something.

        Raises:
            RequestError: 400, there is no such session or turn, the turn still runs, or the input gets too long; 429,
                the sessions hold as much as they may.
        """
        session = self._session(params)
        parent = self._parent(session, params)
        former = session.turns.get(request_id)
        if former is not None and not former.ended.is_set() and not params.replace:
            raise RequestError(f"Duplicate request ID detected: {request_id}", field="rid")
        kept, characters = 0, 0
        if parent is not None:
            parent.end()  # what it may still generate comes too late
            kept, characters = kept_tokens(parent, params, count)
            if begin_token is not None and len(tokens) and tokens[0] == begin_token:
                tokens = tokens[1:]
        own: Int32Array = np.array(tokens, dtype=np.int32)
        if session.capacity:
            characters += len(text) if text is not None else count(tokens)
            check_capacity(session, characters)
        turn = Turn(session, request_id, parent, kept, own, characters)
        if self.num_bytes + turn.num_bytes > self._limits.session_bytes:
            raise RequestError(
                f"the sessions of this server hold {self.num_bytes >> 20} MiB of {self._limits.session_bytes >> 20} "
                "MiB that they may; close some",
                status=429,
            )
        if params.replace and parent is None:
            session.clear()
        elif params.replace and parent is not None:
            session.drop(parent.children)
            parent.children = []
        session.running.add(turn)
        session.count(turn)
        session.used_at = self.clock()
        if not session.streaming:
            session.turns[request_id] = turn
            if parent is not None:
                parent.children.append(turn)
        return turn

    def discard(self, turn: Turn) -> None:
        """Forget a turn that the engine never took."""
        turn.end()
        if turn.parent is not None and turn in turn.parent.children:
            turn.parent.children.remove(turn)
        turn.session.drop([turn])

    def _session(self, params: SessionParams) -> Session:
        self.expire()
        session = self._sessions.get(params.id)
        if session is None:
            raise RequestError(
                f"Invalid request: session id {params.id[:100]} does not exist; open it with /open_session (a session "
                "ends when nobody uses it within its timeout)",
                field="session_params",
            )
        return session

    @staticmethod
    def _turn(session: Session, request_id: str) -> Turn:
        turn = session.turns.get(request_id)
        if turn is None:
            raise RequestError(
                f"Invalid request session id: the session {session.name[:100]!r} has no request {request_id[:100]!r}",
                field="session_params",
            )
        return turn

    def _parent(self, session: Session, params: SessionParams) -> Turn | None:
        if session.streaming:
            return last_of_streaming(session, params)
        if params.rid is None:
            return None
        turn = self._turn(session, params.rid)
        if not turn.ended.is_set() and not params.replace:
            raise RequestError(
                f"Session request is appending to a request that hasn't finished: {params.rid[:100]!r}",
                field="session_params",
            )
        return turn
