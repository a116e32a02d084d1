"""Text that arrives in pieces, and the readers that formats are written with.

A format is a generator that reads a ``Source`` with the functions of this module and yields whenever it needs more
text. It cannot see where one piece ends and the next begins: every reader decides by the characters alone, and waits
while it cannot. What a format finds therefore does not depend on the pieces.

What is kept between two pieces is bounded: the beginning of a marker, ``MAX_TRIMMED`` characters of white space, or
a name up to the limit that its reader states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], object]

MAX_TRIMMED = 256
"""White space before a marker that is left out; more than that is shown."""

MAX_NAME = 512
"""Characters of a function's or parameter's name, with what surrounds it."""

_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text leaves the format; the position of the source is where it does, whatever the pieces were."""


class Source:
    """The text that is not consumed yet.

    Attributes:
        text, at: a window of the text and the place in it up to which it is consumed.
        ended: nothing follows.
        trimmed: white space that ``text_until`` left out before the last marker it found.
    """

    __slots__ = ("_dropped", "_mark", "at", "ended", "text", "trimmed")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.trimmed = ""
        self._dropped = 0
        self._mark: int | None = None

    @property
    def offset(self) -> int:
        """Characters consumed since the beginning."""
        return self._dropped + self.at

    def feed(self, piece: str) -> None:
        """Append text, and forget what was consumed."""
        keep = self.at if self._mark is None else self._mark
        self.text = self.text[keep:] + piece
        self._dropped += keep
        self.at -= keep
        if self._mark is not None:
            self._mark = 0

    def mark(self) -> None:
        """Remember this place; the text from here on is kept until ``release``. Only for a bounded look ahead."""
        self._mark = self.at

    def rewind(self) -> None:
        """Go back to the mark and forget it."""
        if self._mark is not None:
            self.at = self._mark
        self._mark = None

    def release(self) -> None:
        """Forget the mark and stay."""
        self._mark = None


class Markers:
    """Strings to look for. None may be the beginning of another one."""

    __slots__ = ("_firsts", "longest", "pattern", "words")

    def __init__(self, *words: str) -> None:
        self.words = words
        self.pattern = re.compile("|".join(map(re.escape, words)))
        self.longest = max(map(len, words))
        self._firsts = frozenset(word[0] for word in words)

    def partial(self, text: str, low: int) -> int:
        """Where, from ``low`` on, an end of ``text`` begins that could become a marker; its length when none does."""
        for place in range(max(low, len(text) - self.longest + 1), len(text)):
            if text[place] in self._firsts and any(word.startswith(text[place:]) for word in self.words):
                return place
        return len(text)


def _without_space(text: str, low: int, high: int, limit: int, space: str | None) -> int:
    floor = max(low, high - limit)
    return floor + len(text[floor:high].rstrip(space))


def text_until(
    source: Source,
    markers: Markers,
    sink: Sink,
    *,
    trim: int = 0,
    space: str | None = None,
    keep_last_space: bool = True,
) -> Steps[str | None]:
    """Pass text on up to a marker and consume it.

    Args:
        trim: characters of white space before the marker that are not passed on.
        space: which characters are white space, None for all that Unicode calls so.
        keep_last_space: pass them on when no marker but the end of the text follows.

    Returns:
        The marker, None at the end of the text.
    """
    while True:
        text, at = source.text, source.at
        found = markers.pattern.search(text, at)
        if found is not None:
            end = _without_space(text, at, found.start(), trim, space)
            source.trimmed = text[end : found.start()]
            source.at = found.end()
        elif source.ended:
            end = len(text) if keep_last_space else _without_space(text, at, len(text), trim, space)
            source.at = len(text)
        else:
            end = source.at = _without_space(text, at, markers.partial(text, at), trim, space)
        if end > at:
            sink(text[at:end])
        if found is not None:
            return found[0]
        if source.ended:
            return None
        yield


def discard(_: str) -> None:
    """A sink for text that nobody gets to see."""


def rest(source: Source, sink: Sink) -> Steps[None]:
    """Pass everything on up to the end."""
    while True:
        if source.at < len(source.text):
            text, source.at = source.text[source.at :], len(source.text)
            sink(text)
        if source.ended:
            return
        yield


def take_until(source: Source, markers: Markers, limit: int = MAX_NAME) -> Steps[tuple[str, str]]:
    """The text up to a marker, and the marker, which is consumed.

    Raises:
        Malformed: there is none within ``limit`` characters; that much is consumed.
    """
    parts: list[str] = []
    room = limit
    while True:
        text, at = source.text, source.at
        reach = at + room + markers.longest
        found = markers.pattern.search(text, at, reach)
        if found is not None and found.start() <= at + room:
            source.at = found.end()
            parts.append(text[at : found.start()])
            return "".join(parts), found[0]
        if source.ended or len(text) >= reach:
            source.at = min(at + room, len(text))
            raise Malformed
        source.at = min(markers.partial(text, at), at + room)
        parts.append(text[at : source.at])
        room -= source.at - at
        yield


def skip_space(source: Source, limit: int | None = None) -> Steps[None]:
    """Consume white space.

    Raises:
        Malformed: there are more than ``limit`` characters of it.
    """
    start = source.offset
    while True:
        found = _SPACE.match(source.text, source.at)
        end = source.at if found is None else found.end()
        if limit is not None and end - source.at > limit - (source.offset - start):
            source.at += limit - (source.offset - start)
            raise Malformed
        source.at = end
        if end < len(source.text) or source.ended:
            return
        yield


def peek(source: Source) -> Steps[str]:
    """The next character, empty at the end."""
    while source.at >= len(source.text) and not source.ended:
        yield
    return source.text[source.at : source.at + 1]


def take(source: Source, word: str) -> Steps[bool]:
    """Consume ``word`` when it comes next."""
    while True:
        text, at = source.text, source.at
        if text.startswith(word, at):
            source.at += len(word)
            return True
        if source.ended or not word.startswith(text[at : at + len(word)]):
            return False
        yield


def require(source: Source, word: str) -> Steps[None]:
    """Consume ``word``.

    Raises:
        Malformed: something else comes next.
    """
    if not (yield from take(source, word)):
        raise Malformed


def take_name(source: Source, pattern: re.Pattern[str], limit: int = MAX_NAME) -> Steps[str]:
    """Consume characters that ``pattern`` (of single characters, as ``[ab]*``) accepts.

    Raises:
        Malformed: none does, or more than ``limit`` do.
    """
    parts: list[str] = []
    room = limit
    while True:
        found = pattern.match(source.text, source.at, source.at + room + 1)
        end = source.at if found is None else found.end()
        if end - source.at > room:
            source.at += room
            raise Malformed
        parts.append(source.text[source.at : end])
        room -= end - source.at
        source.at = end
        if end < len(source.text) or source.ended:
            name = "".join(parts)
            if not name:
                raise Malformed
            return name
        yield
