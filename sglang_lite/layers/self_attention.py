"""What a decoder layer expects of its first half, whatever kind of attention it is."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan


class SelfAttention(Protocol):
    """Lets each token look at its past over the paged pool."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, plan: AttentionPlan) -> Tensor:
        """[T, hidden] -> [T, hidden], whole on every rank; writes what the tokens leave into the pool."""
