"""A grammar that begins behind the reasoning of an answer, which stays free."""

from __future__ import annotations

import numpy as np

from sglang_lite.grammar.base import UNDECIDED, TokenMatcher
from sglang_lite.types import Int32Array, ThinkingTokens


def behind_thinking(matcher: TokenMatcher, thinking: ThinkingTokens | None) -> TokenMatcher:
    """The matcher itself, or one that waits for the end of the reasoning."""
    return matcher if thinking is None else ThinkingMatcher(matcher, thinking)


class ThinkingMatcher:
    """See ``TokenMatcher``.

    Where the output does not begin inside the reasoning, its first token decides: the one that opens it, or one that
    the grammar allows. So no answer is without reasoning and without grammar.
    """

    def __init__(self, matcher: TokenMatcher, thinking: ThinkingTokens) -> None:
        self._matcher = matcher
        self._thinking = thinking
        self._num_thought = 0
        self._num_matched = 0
        self._has_ended = False

    @property
    def _may_open(self) -> bool:
        return self._thinking.start >= 0 and not self._num_thought and not self._num_matched

    @property
    def _has_begun(self) -> bool:
        """The grammar counts."""
        return self._has_ended or self._num_matched > 0

    def accept(self, token: int) -> bool:
        if self._has_begun or (self._may_open and token != self._thinking.start):
            if not self._matcher.accept(token):
                return False
            self._num_matched += 1
            return True
        self._num_thought += 1
        self._has_ended = token == self._thinking.end
        return True

    def fill(self, bits: Int32Array) -> None:
        if not self._has_begun and not self._may_open:
            bits.fill(UNDECIDED)
            return
        self._matcher.fill(bits)
        if self._may_open:
            start = self._thinking.start
            bits.view(np.uint32)[start // 32] |= np.uint32(1 << (start % 32))

    def rollback(self, count: int) -> None:
        matched = min(count, self._num_matched)
        self._matcher.rollback(matched)
        self._num_matched -= matched
        if count > matched:
            self._num_thought -= count - matched
            self._has_ended = False

    def forced(self) -> list[int]:
        return self._matcher.forced() if self._has_begun else []

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_terminated
