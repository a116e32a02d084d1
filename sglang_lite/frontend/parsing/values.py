"""A scanner of JSON and Python values that arrive in pieces: it passes them on as JSON while it reads.

Separators become ``", "`` and ``": "``, white space between elements goes. Strings keep the spelling of their escapes.
Small faults that models make are repaired: raw line ends in strings, unknown escapes, a comma before a closing bracket.
"""

from __future__ import annotations

import re

from sglang_lite.frontend.parsing.source import Malformed, Sink, Source, Steps

MAX_DEPTH = 128
_MAX_TOKEN = 4096

_SPACE = re.compile(r"\s*")
_TOKEN = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?\Z", re.ASCII)
_RUNS = {quote: re.compile(rf"[^\\\x00-\x1f\"{quote}]*") for quote in "\"'"}
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_JSON_ESCAPES = frozenset('"\\/bfnrt')
_PYTHON_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "v": "\\u000b", "a": "\\u0007", "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")


class ValueScanner:
    """One value, read piece by piece.

    Args:
        python: read Python literals (single quotes, tuples, Python's escapes) instead of JSON.

    Attributes:
        done: the value is complete.
        failed: the text is no such value.
    """

    def __init__(self, *, python: bool = False) -> None:
        self.done = False
        self.failed = False
        self._python = python
        self._stack: list[str] = []
        self._state = "value"
        self._quote = ""
        self._is_key = False
        self._separator = ""
        self._token = ""
        self._escape = ""
        self._out: list[str] = []

    def scan(self, text: str, at: int, end: int) -> tuple[int, str]:
        """Read ``text[at:end]`` as far as the value goes.

        Returns:
            Where it stopped, and the JSON of what it read.
        """
        while at < end and not self.done and not self.failed:
            if self._state == "string":
                at = self._scan_string(text, at, end)
            elif self._state == "token":
                at = self._scan_token(text, at, end)
            else:
                at = self._scan_structure(text, at, end)
        out, self._out = "".join(self._out), []
        return at, out

    def finish(self) -> str | None:
        """The text ended: what is still to be passed on, None when the value is not complete."""
        if self._state == "token" and not self._stack and not self.done and not self.failed:
            self._end_token()
        out, self._out = "".join(self._out), []
        return out if self.done else None

    def _scan_structure(self, text: str, at: int, end: int) -> int:
        found = _SPACE.match(text, at, end)
        at = at if found is None else found.end()
        if at == end:
            return at
        char, closer = text[at], self._stack[-1] if self._stack else ""
        if char == closer and self._state in ("first", "key", "after", "value"):
            self._close()
        elif self._state == "after" and char == ",":
            self._separator = ", "
            self._state = "key" if closer == "}" else "value"
        elif self._state == "colon" and char == ":":
            self._out.append(": ")
            self._state = "value"
            self._separator = ""
        elif self._state in ("first", "key", "value"):
            return self._begin(char, at)
        else:
            self.failed = True
            return at
        return at + 1

    def _close(self) -> None:
        closer = self._stack.pop()
        if self._state == "value" and closer == "}":  # a key without its value
            self.failed = True
            return
        self._separator = ""
        self._out.append("}" if closer == "}" else "]")
        self._end_value()

    def _begin(self, char: str, at: int) -> int:
        """A value or a key begins with ``char``."""
        is_key = bool(self._stack) and self._stack[-1] == "}" and self._state != "value"
        if char == '"' or (char == "'" and self._python):
            self._put('"')
            self._quote, self._is_key, self._state = char, is_key, "string"
            return at + 1
        if is_key:
            self.failed = True
        elif char in "{[" or (char == "(" and self._python):
            if len(self._stack) >= MAX_DEPTH:
                self.failed = True
                return at
            self._put("{" if char == "{" else "[")
            self._stack.append(_CLOSERS[char])
            self._state = "key" if char == "{" else "first"
            return at + 1
        elif char in "-+._" or char.isalnum():
            self._token, self._state = "", "token"
        else:
            self.failed = True
        return at

    def _put(self, text: str) -> None:
        self._out.append(self._separator + text)
        self._separator = ""

    def _end_value(self) -> None:
        if self._stack:
            self._state = "after"
        else:
            self.done = True

    def _scan_token(self, text: str, at: int, end: int) -> int:
        found = _TOKEN.match(text, at, min(end, at + _MAX_TOKEN + 1 - len(self._token)))
        stop = at if found is None else found.end()
        self._token += text[at:stop]
        if len(self._token) > _MAX_TOKEN:
            self.failed = True
        elif stop < end:
            self._end_token()
        return stop

    def _end_token(self) -> None:
        value = self._token if _NUMBER.match(self._token) else _CONSTANTS.get(self._token)
        if value is None:
            self.failed = True
            return
        self._put(value)
        self._end_value()

    def _scan_string(self, text: str, at: int, end: int) -> int:
        if self._escape:
            return self._scan_escape(text[at], at)
        found = _RUNS[self._quote].match(text, at, end)
        stop = at if found is None else found.end()
        if stop > at:
            self._out.append(text[at:stop])
        if stop == end:
            return stop
        char = text[stop]
        if char == self._quote:
            self._out.append('"')
            if self._is_key:
                self._state = "colon"
            else:
                self._end_value()
        elif char == "\\":
            self._escape = char
        elif char == '"':
            self._out.append('\\"')
        else:
            self._out.append(_CONTROL.get(char) or f"\\u{ord(char):04x}")
        return stop + 1

    def _scan_escape(self, char: str, at: int) -> int:
        """One more character of an escape sequence."""
        if len(self._escape) == 1:
            if char in _DIGITS and (char == "u" or self._python):
                self._escape += char
            elif self._python and char in "01234567":
                self.failed = True  # octal escapes: nobody means them
            else:
                self._out.append(self._short_escape(char))
                self._escape = ""
            return at + 1
        if char not in _HEX:
            self.failed = True
            return at
        self._escape += char
        kind, digits = self._escape[1], self._escape[2:]
        if len(digits) == _DIGITS[kind]:
            self._escape = ""
            code = int(digits, 16)
            if code > 0x10FFFF:
                self.failed = True
            else:
                self._out.append(f"\\u{code:04x}" if code <= 0xFFFF and kind != "u" else _unicode(kind, digits, code))
        return at + 1

    def _short_escape(self, char: str) -> str:
        if self._python and char in _PYTHON_ESCAPES:
            return _PYTHON_ESCAPES[char]
        if char in _JSON_ESCAPES and not (self._python and char == "/"):
            return "\\" + char
        if char == "'":
            return char
        return "\\\\" + (_CONTROL.get(char) or (char if char >= " " else f"\\u{ord(char):04x}"))


def _unicode(kind: str, digits: str, code: int) -> str:
    """The escape as it came, or the character where JSON has no escape of that length."""
    return f"\\u{digits}" if kind == "u" else chr(code)


def read_value(source: Source, sink: Sink, *, python: bool = False, limit: int | None = None) -> Steps[None]:
    """Pass a value on as JSON.

    Args:
        limit: most characters it may have.

    Raises:
        Malformed: the text is no such value, or ends inside it.
    """
    scanner = ValueScanner(python=python)
    start = source.offset
    while True:
        end = len(source.text)
        if limit is not None:
            end = min(end, source.at + limit - (source.offset - start))
        source.at, out = scanner.scan(source.text, source.at, end)
        if out:
            sink(out)
        if scanner.done:
            return
        if scanner.failed or (limit is not None and source.offset - start >= limit):
            raise Malformed
        if source.ended:
            last = scanner.finish()
            if last is None:
                raise Malformed
            sink(last)
            return
        yield


def value_of(text: str, *, python: bool = False) -> str | None:
    """The JSON of a whole value, None when ``text`` is not exactly one."""
    scanner = ValueScanner(python=python)
    at, out = scanner.scan(text, 0, len(text))
    last = scanner.finish()
    return None if last is None or text[at:].strip() else out + last


def is_unicode(text: str) -> bool:
    """Whether ``text`` can be sent: it has no half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)
