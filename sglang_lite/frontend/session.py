"""One session of a front: its turns, what each of them adds, and what that costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sglang_lite.frontend.request import GenerationOutput
from sglang_lite.types import Int32Array, RequestError

if TYPE_CHECKING:
    from sglang_lite.frontend.sessions import SessionStore

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


def last_of_streaming(session: Session, params: SessionParams) -> Turn | None:
    """The turn that a streaming session goes on from."""
    wrong = next((name for name in ("replace", "drop_previous_output", "offset") if getattr(params, name)), None)
    if session.running:
        raise RequestError("Streaming session already has an active request.", field="session_params")
    if wrong is not None:
        raise RequestError(f"Streaming sessions do not support {wrong}.", field="session_params")
    return next(iter(session.turns.values()), None)


def kept_tokens(parent: Turn, params: SessionParams, count: CountCharacters) -> tuple[int, int]:
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


def check_capacity(session: Session, characters: int) -> None:
    """Refuse an input that is longer than the session was opened for.

    Raises:
        RequestError: with both numbers.
    """
    if characters > session.capacity:
        raise RequestError(
            f"the session {session.name[:100]!r} was opened with capacity_of_str_len={session.capacity}, and this "
            f"request makes it {characters} characters long; open a larger one, or keep less with offset",
            field="session_params",
        )
