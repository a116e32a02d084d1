"""A stream that moves to another worker when its own breaks (``--migrate-streams``).

A worker that can is asked for marks (``sglang_lite.server.resumable``): behind the events of each portion of output
stands a comment with their token ids, which is taken out here. Events go on to the client once their mark is there, so
what the client has and what is known of it are the same at every moment. When the worker breaks, another one gets the
same request with these ids, computes them as if it had made them, and the stream goes on behind them.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from sglang_lite.router.body import NOT_READ, Head, with_fields

HEADER = "x-sgl-resumable"
FIELD = "resume_from"
MOVABLE = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
MOST_HELD = 8 << 20
"""Bytes without a mark: the events of one portion of output are far fewer, even where each repeats the whole text."""
MOST_SENT = 1 << 20
"""Tokens and portions that are remembered of one stream."""
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
        failed: the worker cannot go on: it says so, or what it sends makes no sense.
        moves: times that the stream went on elsewhere.
    """

    def __init__(self) -> None:
        self.response: web.StreamResponse | None = None
        self.failed = False
        self.moves = 0
        self._held = bytearray()
        self._looked = 0  # from here on no mark has been looked for
        self._sent: list[list[int]] = []
        self._size = 0
        self._id = ""
        self._created = 0

    def take(self, data: bytes) -> bytes:
        """Events that may go to the client now; what has no mark yet is held.

        A mark that is none, and more than ``MOST_HELD`` bytes without any, mean that the worker cannot go on.
        """
        held = self._held
        held += data
        ready, place = [], 0
        while (start := _mark_start(held, place, max(place, self._looked))) >= 0:
            end = held.find(_END, start)
            if end < 0:
                break
            if not self._note(held[start + len(_MARK) : end]):
                self.failed = True
                break
            ready.append(bytes(held[place:start]))
            place = end + len(_END)
        del held[:place]
        # A mark that has not come whole is found again; what can be its beginning is looked at again.
        self._looked = max(0, start - place - len(_END) if start >= 0 else len(held) - len(_END + _MARK))
        self.failed |= len(held) > MOST_HELD
        return b"".join(ready)

    def rest(self) -> bytes:
        """What a whole stream ends with behind its last mark."""
        return bytes(self._held)

    def body(self, body: bytes, head: Head) -> bytes:
        """The request for the next worker. What came without a mark is dropped: the next worker makes it again."""
        self._held, self._looked, self.failed = bytearray(), 0, False
        if not self._sent:
            return body
        return with_fields(body, head, {FIELD: {"sent": self._sent, "id": self._id, "created": self._created}})

    def _note(self, text: bytearray) -> bool:
        """Remember a mark; False for one that is none, too many, or says that the worker cannot go on."""
        try:
            mark = _decoder.decode(text)
        except NOT_READ:
            return False
        size = sum(1 + len(portion) for portion in mark.sent)
        if mark.failed or self._size + size > MOST_SENT:
            return False
        self._size += size
        self._sent += mark.sent
        if mark.id is not None:
            self._id, self._created = mark.id, mark.created or 0
        return True


def movement(path: str, head: Head) -> Movement | None:
    """For a request whose answer may move; None for any other."""
    if path not in MOVABLE or head.stream is not True or bytes(head.resume_from):
        return None
    return Movement()


def _mark_start(held: bytearray, place: int, looked: int) -> int:
    """Where the next mark behind ``place`` begins, -1 without one; there is none before ``looked``. A mark is a block
    of its own."""
    if held.startswith(_MARK, place):
        return place
    found = held.find(_END + _MARK, looked)
    return found + len(_END) if found >= 0 else -1
