"""Stop strings and stop patterns over growing text.

The rule does not depend on how the text is cut into tokens: generation ends at the first character with which any
stop is complete. Of several that complete there, strings come before patterns, and the longest string wins (it began
first). A string is cut from the text, together with everything after it; a pattern's match stays, and the text ends
with it.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass

import re2

from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.types import RequestError

MAX_STOPS = LIMITS.stop_strings
MAX_STOP_LENGTH = LIMITS.stop_characters
"""Characters in all stop strings of a request; bounds the work of a token."""
MAX_PATTERN_BYTES = LIMITS.pattern_bytes
MAX_PROGRAM_SIZE = LIMITS.pattern_instructions
"""Instructions of all compiled patterns of one request."""
_MAX_WINDOW = 16384
_SEARCH_STEPS = 1 << 20
"""Bound of (instructions x bytes) for one search: a few milliseconds when RE2 is at its slowest."""
_CHECK_MEMORY = 1 << 16
_PATTERN_MEMORY = 1 << 20
_POSITION_SENSITIVE = ("$", r"\z", r"\b", r"\B")
_UNBOUNDED = ("*", "+", ",}")


@dataclass(slots=True, frozen=True)
class StopMatch:
    """What ended the text: the string or the pattern as the request gave it."""

    matched: str
    is_pattern: bool


def compile_stop_patterns(patterns: tuple[str, ...]) -> list[re2._Regexp]:
    """Compile patterns in RE2's syntax: linear time, so no look-around and no back-references.

    Raises:
        RequestError: a pattern is too long, invalid, uses what RE2 does not have, or they are too expensive together.
    """
    compiled = [_compile(pattern) for pattern in patterns]
    size = sum(pattern.programsize for pattern in compiled)
    if size > MAX_PROGRAM_SIZE:
        raise _too_expensive(f"has {size} instructions when compiled")
    return compiled


@functools.lru_cache(maxsize=64)
def _compile(pattern: str) -> re2._Regexp:
    size = len(pattern.encode("utf-8", "replace"))
    if size > MAX_PATTERN_BYTES:
        raise RequestError(f"stop_regex is {size} bytes, over the {MAX_PATTERN_BYTES}-byte limit", field="stop_regex")
    try:
        # With little memory first: a huge program is refused before time is spent on it.
        re2.compile(pattern.encode(), _options(_CHECK_MEMORY))
        return re2.compile(pattern.encode(), _options(_PATTERN_MEMORY))
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0] if error.args else error
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        if "too large" in text:
            raise _too_expensive("is too large when compiled") from error
        raise RequestError(
            f"stop_regex {pattern!r} is not a valid RE2 pattern: {text} (look-around and back-references do not exist)",
            field="stop_regex",
        ) from error


def _options(memory: int) -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = memory
    return options


def _too_expensive(what: str) -> RequestError:
    return RequestError(
        f"stop_regex {what}, over the limit of {MAX_PROGRAM_SIZE} instructions; use smaller repetition counts",
        field="stop_regex",
    )


class StopChecker:
    """Stop search over one sequence's text.

    Args:
        stop: non-empty strings.
        stop_regex: RE2 patterns.
        no_stop_trim: keep a matched string in the text (which then ends with it).
    """

    __slots__ = ("_first_characters", "_held", "_keep", "_patterns", "_stops", "match")

    def __init__(self, stop: tuple[str, ...], stop_regex: tuple[str, ...] = (), *, no_stop_trim: bool = False) -> None:
        self._stops = stop
        self._first_characters = frozenset(string[0] for string in stop)
        self._patterns = _PatternSearch(stop_regex) if stop_regex else None
        self._keep = no_stop_trim
        self._held = ""
        self.match: StopMatch | None = None

    def push(self, delta: str) -> str:
        """Add text; returns what may be shown now. After a match (``match`` is set) everything is empty."""
        if self.match is not None or not delta:
            return ""
        text = self._held + delta
        found = self._find_string(text)
        pattern_end = -1
        if self._patterns is not None:
            limit = len(delta) if found is None else found[0] - len(self._held)
            pattern = self._patterns.push(delta[:limit])
            if pattern is not None and (found is None or len(self._held) + pattern[0] < found[0]):
                pattern_end = len(self._held) + pattern[0]
                self.match = StopMatch(pattern[1], True)
        if pattern_end >= 0:
            self._held = ""
            return text[:pattern_end]
        if found is not None:
            end, start, string = found
            self.match = StopMatch(string, False)
            self._held = ""
            return text[:end] if self._keep else text[:start]
        keep_from = self._hold_from(text)
        self._held = text[keep_from:]
        return text[:keep_from]

    def finish(self) -> str:
        """Text that was held back and can no longer become a stop, because nothing follows."""
        held, self._held = self._held, ""
        return held

    def _find_string(self, text: str) -> tuple[int, int, str] | None:
        """(end, start, string) of the occurrence that is complete first, the longest of those."""
        best: tuple[int, int, str] | None = None
        for string in self._stops:
            start = text.find(string)
            if start >= 0 and (best is None or (start + len(string), start) < best[:2]):
                best = (start + len(string), start, string)
        return best

    def _hold_from(self, text: str) -> int:
        """Where the longest tail begins that is the beginning of a stop string."""
        size = len(text)
        earliest = size
        for string in self._stops:
            start = text.find(string[0], max(0, size - len(string) + 1), earliest)
            while start >= 0:
                if string.startswith(text[start:]):
                    earliest = start
                    break
                start = text.find(string[0], start + 1, earliest)
        return earliest


class _PatternSearch:
    """First place where any pattern has matched, over text that arrives in pieces."""

    __slots__ = ("_every_position", "_patterns", "_text", "_window")

    def __init__(self, patterns: tuple[str, ...]) -> None:
        compiled = compile_stop_patterns(patterns)
        self._patterns = list(zip(patterns, compiled, strict=True))
        size = sum(pattern.programsize for pattern in compiled)
        # Without repetition every byte of a match takes its own instruction. With it, a match may begin as far back
        # as the work of one search allows.
        bounded = not any(mark in pattern for pattern in patterns for mark in _UNBOUNDED)
        self._window = size if bounded else min(_MAX_WINDOW, _SEARCH_STEPS // size)
        # Such a pattern may match here and no longer match with more text, so each length has to be looked at.
        self._every_position = any(mark in pattern for pattern in patterns for mark in _POSITION_SENSITIVE)
        self._text = bytearray()

    def push(self, delta: str) -> tuple[int, str] | None:
        """(characters of ``delta`` up to the end of the first match, pattern), None without a match."""
        if not self._every_position:
            return self._search(delta)
        for count, character in enumerate(delta, 1):
            found = self._search(character)
            if found is not None:
                return count, found[1]
        return None

    def _search(self, delta: str) -> tuple[int, str] | None:
        old = len(self._text)
        start = max(0, old - self._window)
        self._text += delta.encode("utf-8", "replace")
        best: tuple[int, str] | None = None
        for pattern, compiled in self._patterns:
            if compiled.search(self._text, start) is None:
                continue
            ends = _character_ends(delta, old)
            count = bisect.bisect_left(ends, True, key=lambda end: compiled.search(self._text, start, end) is not None)
            if best is None or count + 1 < best[0]:
                best = (count + 1, pattern)
        return best


def _character_ends(delta: str, start: int) -> list[int]:
    """Byte offset behind each character of ``delta``, which begins at byte ``start``."""
    ends = []
    for character in delta:
        start += len(character.encode("utf-8", "replace"))
        ends.append(start)
    return ends
