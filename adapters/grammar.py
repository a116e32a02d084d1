"""Protocol of grammar-constrained decoding: which tokens a row may draw, as bits."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class GrammarOperations(Protocol):
    """Masks of tokens on one device."""

    def apply_bitmask(self, logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
        """Set the logits of forbidden tokens to -inf, in place.

        logits [B, V], contiguous, of float32, float16 or bfloat16; bitmask int32 [B, ceil(V / 32)], bit ``t % 32`` of
        word ``t // 32`` is 1 where token t is allowed; rows int32 [R]: only these rows are masked, each with its own
        bits; None: all are.
        """


def bitmask_width(vocab_size: int) -> int:
    """Words of a row of bits."""
    return -(-vocab_size // 32)
