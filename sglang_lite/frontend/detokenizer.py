"""Text from tokens that arrive one at a time.

Whatever way the token list is cut, the concatenation of the deltas is the one-shot decode of the whole list. Text
that later tokens could still change (an incomplete code point, a run of byte tokens) is held back until they cannot,
and comes out of ``finish`` exactly as the one-shot decode has it.
"""

from __future__ import annotations

import codecs
from typing import Protocol

import tokenizers

from sglang_lite.frontend.pieces import BytePieces, TextCache, TokenPieces

_WINDOW = 8
_REPLACEMENT = "�"


class IncrementalDetokenizer(Protocol):
    """One sequence's text. Not reusable after ``finish``."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token, possibly empty."""
        ...

    def finish(self) -> str:
        """The text still held back. Empty on a second call."""
        ...


class ByteLevelDetokenizer:
    """For byte-level vocabularies: joins bytes and reads them as UTF-8, malformed sequences replaced."""

    __slots__ = ("_pending", "_pieces", "_texts")

    def __init__(self, pieces: BytePieces, texts: TextCache) -> None:
        self._pieces = pieces
        self._texts = texts
        self._pending = b""

    def push(self, token_id: int) -> str:
        text = self._texts[token_id]
        if not self._pending:
            if text is not None:
                return text
        elif text == "":
            return ""
        data = self._pending + self._pieces.token_bytes(token_id)
        decoded, consumed = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        return decoded

    def finish(self) -> str:
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace")


class TokenLevelDetokenizer:
    """For token-level vocabularies. A run of byte tokens is read as a whole: if any part of it is malformed, the
    library replaces every byte of the run, so nothing of it is certain before the run ends."""

    __slots__ = ("_first", "_pieces", "_run", "_skipped", "_texts")

    def __init__(self, pieces: TokenPieces, texts: TextCache, skipped: frozenset[int]) -> None:
        self._pieces = pieces
        self._texts = texts
        self._skipped = skipped
        self._run: list[int] = []
        self._first = True

    def push(self, token_id: int) -> str:
        text = self._texts[token_id]
        if text is None:
            self._run.append(token_id)
            return ""
        if not self._first and not self._run:
            return text
        if token_id in self._skipped or not self._pieces.known(token_id):
            return ""
        held = self._release_run()
        if self._first:
            self._first = False
            return self._pieces.join([token_id], first=True)
        return held + text

    def finish(self) -> str:
        return self._release_run()

    def _release_run(self) -> str:
        if not self._run:
            return ""
        text = self._pieces.join(self._run, first=self._first)
        self._run = []
        self._first = False
        return text


class WindowedDetokenizer:
    """For any other decoder: decodes a window of tokens, and holds back what two successive readings disagree on.

    ``finish`` decodes the whole list once and gives everything beyond what was sent.
    """

    __slots__ = ("_backend", "_ids", "_sent", "_skip", "_window_sent", "_window_start")

    def __init__(self, backend: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._sent = 0
        self._window_start = 0
        self._window_sent = 0

    def push(self, token_id: int) -> str:
        window = self._ids[self._window_start :]
        before = self._decode(window)
        self._ids.append(token_id)
        window.append(token_id)
        after = self._decode(window)
        stable = _common_prefix(before, after.rstrip(_REPLACEMENT))
        text = after[self._window_sent : stable]
        if len(text) > 0:
            self._window_sent = stable
            self._sent += len(text)
        self._slide(window, after)
        return text

    def _slide(self, window: list[int], text: str) -> None:
        """Drop the older part of a full window: text that is sent, and without which the rest reads the same."""
        for start in range(_WINDOW, len(window) - _WINDOW + 1):
            rest = self._decode(window[start:])
            dropped = len(text) - len(rest)
            if dropped <= self._window_sent and text.endswith(rest):
                self._window_start += start
                self._window_sent -= dropped
                return

    def finish(self) -> str:
        text = self._decode(self._ids)[self._sent :]
        self._sent += len(text)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=self._skip)


def _common_prefix(left: str, right: str) -> int:
    if right.startswith(left):
        return len(left)
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
