"""A grammar of a single text, given as token ids, the last of which ends it."""

from __future__ import annotations

import numpy as np

from sglang_lite.types import Int32Array


class ScriptedMatcher:
    """See ``grammar.base.TokenMatcher``.

    Attributes:
        left: what is still to come.
    """

    def __init__(self, *tokens: int) -> None:
        self.left = list(tokens)
        self._taken: list[int] = []

    def accept(self, token: int) -> bool:
        if not self.left or token != self.left[0]:
            return False
        self._taken.append(self.left.pop(0))
        return True

    def rollback(self, count: int) -> None:
        for _ in range(count):
            self.left.insert(0, self._taken.pop())

    def forced(self) -> list[int]:
        return list(self.left)

    def fill(self, bits: Int32Array) -> None:
        bits.fill(0 if self.left else -1)
        if self.left:
            bits.view(np.uint32)[self.left[0] // 32] = np.uint32(1 << (self.left[0] % 32))

    @property
    def is_terminated(self) -> bool:
        return not self.left
