"""A stream that moves to another worker when its own breaks (``--migrate-streams``).

A worker that can is asked for marks (``sglang_lite.server.resumable``): behind the events of each portion of output
stands a comment with their token ids, which is taken out here. Events go on to the client once their mark is there, so
what the client has and what is known of it are the same at every moment. When the worker breaks, another one gets the
same request with these ids, computes them as if it had made them, and the stream goes on behind them.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from sglang_lite.router.body import Head, with_fields

HEADER = "x-sgl-resumable"
FIELD = "resume_from"
MOVABLE = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
_MARK = b":sgl "
_END = b"\n\n"


class _Mark(msgspec.Struct):
    sent: list[list[int]] = msgspec.field(default_factory=list)
    id: str | None = None
    created: int | None = None
    failed: bool = False


_decoder = msgspec.json.Decoder(_Mark)


class Movement:
    """What is known of one stream that can move.

    Attributes:
        response: what the client gets, once it has begun.
        failed: the worker says that it cannot go on.
        moves: times that the stream went on elsewhere.
    """

    def __init__(self) -> None:
        self.response: web.StreamResponse | None = None
        self.failed = False
        self.moves = 0
        self._held = b""
        self._sent: list[list[int]] = []
        self._id = ""
        self._created = 0

    def take(self, data: bytes) -> bytes:
        """Events that may go to the client now; what has no mark yet is held.

        Raises:
            ValueError: a mark that is none.
        """
        held = self._held + data if self._held else data
        ready, place = [], 0
        while (start := _mark_start(held, place)) >= 0:
            end = held.find(_END, start)
            if end < 0:
                break
            mark = _decoder.decode(held[start + len(_MARK) : end])
            if mark.failed:
                self.failed = True
                break
            self._note(mark)
            ready.append(held[place:start])
            place = end + len(_END)
        self._held = held[place:]
        return b"".join(ready)

    def rest(self) -> bytes:
        """What a whole stream ends with behind its last mark."""
        return self._held

    def body(self, body: bytes, head: Head) -> bytes:
        """The request for the next worker. What came without a mark is dropped: the next worker makes it again."""
        self._held, self.failed = b"", False
        if not self._sent:
            return body
        return with_fields(body, head, {FIELD: {"sent": self._sent, "id": self._id, "created": self._created}})

    def _note(self, mark: _Mark) -> None:
        self._sent += mark.sent
        if mark.id is not None:
            self._id, self._created = mark.id, mark.created or 0


def movement(path: str, head: Head) -> Movement | None:
    """For a request whose answer may move; None for any other."""
    if path not in MOVABLE or head.stream is not True or bytes(head.resume_from):
        return None
    return Movement()


def _mark_start(held: bytes, place: int) -> int:
    """Where the next mark begins, -1 without one. A mark is a block of its own."""
    if held.startswith(_MARK, place):
        return place
    found = held.find(_END + _MARK, place)
    return found + len(_END) if found >= 0 else -1
