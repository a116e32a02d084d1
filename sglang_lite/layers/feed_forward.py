"""What a decoder layer expects of its second half: a dense block or a mixture of experts."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class FeedForward(Protocol):
    """Works on each token alone."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden], whole on every rank."""
