"""Sessions: conversations whose tokens the front keeps, so that requests name what they continue and send what is new.

A session is a tree of turns, one a request. A turn keeps only what it added: how many tokens of its parent it takes
over, its own input, and its output. Nothing of the engine belongs to a session: the prefix cache finds the beginning
of a continued conversation as it finds any other.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_lite.frontend.request import GenerationOutput
from sglang_lite.frontend.request_limits import LIMITS, RequestLimits
from sglang_lite.types import Int32Array, RequestError

TURN_BYTES = 1024
"""What a turn costs beside its tokens, about."""

_NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)

CountCharacters = Callable[[Sequence[int]], int]
"""Characters that token ids stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParams:
    """What a request wants of a session: ``session_params``.

    Attributes:
        id: the session.
        rid: the request that is continued; None begins anew.
        offset: keep only that many of its tokens (negative: all but that many); None and 0 keep all.
        replace: drop everything that continues ``rid``, and without ``rid`` the whole session, first.
        drop_previous_output: continue the input of ``rid``, not its output.
    """

    id: str
    rid: str | None = None
    offset: int | None = None
    replace: bool = False
    drop_previous_output: bool = False


@dataclass(slots=True, eq=False)
class Turn:
    """One request of a session.

    Attributes:
        parent: the turn it continues; kept: tokens of the parent's input and output in front of its own.
        tokens: int32[T], its own input.
        characters: of its whole input.
        output: tokens generated; final once ``ended`` is set.
        output_characters: of the text of these.
        counted: bytes that its session counts for it; 0 once it was dropped.
    """

    session: Session
    request_id: str
    parent: Turn | None
    kept: int
    tokens: Int32Array
    characters: int
    children: list[Turn] = field(default_factory=list)
    output: Int32Array = field(default_factory=lambda: _NO_TOKENS)
    output_characters: int = 0
    counted: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _seen: GenerationOutput | None = field(default=None, init=False)

    @property
    def input_length(self) -> int:
        """Tokens of its whole input."""
        return self.kept + len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens of input and output."""
        return self.input_length + len(self.output)

    @property
    def num_bytes(self) -> int:
        """What keeping it costs, about."""
        return TURN_BYTES + self.tokens.nbytes + self.output.nbytes

    def history(self, length: int) -> Int32Array:
        """int32[length]: the first tokens of input and output."""
        pieces: list[Int32Array] = []
        turn: Turn | None = self
        while turn is not None and length > 0:
            if length > turn.input_length:
                pieces.append(turn.output[: length - turn.input_length])
            if length > turn.kept:
                pieces.append(turn.tokens[: length - turn.kept])
            length = min(length, turn.kept)
            turn = turn.parent
        return np.concatenate(pieces[::-1]) if pieces else _NO_TOKENS

    def observe(self, output: GenerationOutput) -> None:
        """The sequence has come that far."""
        self._seen = output
        if output.finish_reason is not None:
            self.end(succeeded=output.finish_reason.type != "abort")

    def end(self, *, succeeded: bool = False) -> None:
        """Nothing is added to it any more. May be called again."""
        if self.ended.is_set():
            return
        if self._seen is not None:
            self.output = np.array(self._seen.output_ids, dtype=np.int32)
            self.output_characters = len(self._seen.text)
        self._seen = None
        self.ended.set()
        self.session.turn_ended(self, succeeded=succeeded)

    @property
    def was_seen(self) -> bool:
        """Whether the engine took it."""
        return self._seen is not None or self.ended.is_set()


@dataclass(slots=True, eq=False)
class Session:
    """An open session.

    Attributes:
        capacity: most characters of an input; 0 for no limit of its own.
        streaming: only continues its last turn that succeeded, one request at a time.
        timeout: seconds without a request after which it is closed.
        turns: request id -> turn.
        used_at: time of the last request's arrival or end.
        num_bytes: of its turns.
        running: turns that have not ended.
    """

    store: SessionStore
    name: str
    capacity: int
    streaming: bool
    timeout: float
    used_at: float
    turns: dict[str, Turn] = field(default_factory=dict)
    num_bytes: int = 0
    running: set[Turn] = field(default_factory=set)

    def turn_ended(self, turn: Turn, *, succeeded: bool) -> None:
        """Called by the turn; ``succeeded`` says that nothing forced its end."""
        self.running.discard(turn)
        self.used_at = self.store.clock()
        if not turn.counted:
            return
        if not self.streaming:
            self.count(turn)
        elif succeeded:
            self._go_on_from(turn)
        else:
            self.drop([turn])

    def _go_on_from(self, turn: Turn) -> None:
        """Nothing but this turn of a streaming session can be continued: it takes over what came before."""
        turn.tokens, turn.kept, turn.parent = turn.history(turn.input_length), 0, None
        before, self.turns = list(self.turns.values()), {turn.request_id: turn}
        for other in before:
            self.add_bytes(-other.counted)
            other.counted = 0
        self.count(turn)

    def count(self, turn: Turn) -> None:
        """Account for what a turn holds now."""
        self.add_bytes(turn.num_bytes - turn.counted)
        turn.counted = turn.num_bytes

    def add_bytes(self, count: int) -> None:
        """Account for memory gained or given up."""
        self.num_bytes += count
        self.store.num_bytes += count

    def drop(self, turns: Sequence[Turn]) -> None:
        """Forget these turns and everything that continues them."""
        for turn in self.descendants(turns):
            turn.children = []
            if self.turns.get(turn.request_id) is turn:
                del self.turns[turn.request_id]
            self.add_bytes(-turn.counted)
            turn.counted = 0

    def clear(self) -> None:
        """Forget all turns."""
        self.drop(list(self.turns.values()))
        self.add_bytes(-self.num_bytes)  # turns whose id a later one took are in no table, and go with the others

    def descendants(self, turns: Sequence[Turn]) -> list[Turn]:
        """These turns and everything that continues them."""
        found, waiting = [], list(turns)
        while waiting:
            turn = waiting.pop()
            found.append(turn)
            waiting += turn.children
        return found


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
            kept, characters = _kept(parent, params, count)
            if begin_token is not None and len(tokens) and tokens[0] == begin_token:
                tokens = tokens[1:]
        own: Int32Array = np.array(tokens, dtype=np.int32)
        if session.capacity:
            characters += len(text) if text is not None else count(tokens)
            _check_capacity(session, characters)
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
            return _last_of_streaming(session, params)
        if params.rid is None:
            return None
        turn = self._turn(session, params.rid)
        if not turn.ended.is_set() and not params.replace:
            raise RequestError(
                f"Session request is appending to a request that hasn't finished: {params.rid[:100]!r}",
                field="session_params",
            )
        return turn


def _last_of_streaming(session: Session, params: SessionParams) -> Turn | None:
    """The turn that a streaming session goes on from."""
    wrong = next((name for name in ("replace", "drop_previous_output", "offset") if getattr(params, name)), None)
    if session.running:
        raise RequestError("Streaming session already has an active request.", field="session_params")
    if wrong is not None:
        raise RequestError(f"Streaming sessions do not support {wrong}.", field="session_params")
    return next(iter(session.turns.values()), None)


def _kept(parent: Turn, params: SessionParams, count: CountCharacters) -> tuple[int, int]:
    """Tokens of ``parent`` that a new turn takes over, and their characters."""
    if params.drop_previous_output:
        whole, characters = parent.input_length, parent.characters
    else:
        whole, characters = parent.length, parent.characters + parent.output_characters
    if not params.offset:
        return whole, characters
    kept = len(range(*slice(params.offset).indices(whole)))
    if kept == whole or not parent.session.capacity:
        return kept, characters
    return kept, count(parent.history(kept).tolist())


def _check_capacity(session: Session, characters: int) -> None:
    if characters > session.capacity:
        raise RequestError(
            f"the session {session.name[:100]!r} was opened with capacity_of_str_len={session.capacity}, and this "
            f"request makes it {characters} characters long; open a larger one, or keep less with offset",
            field="session_params",
        )
