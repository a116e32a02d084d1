"""Protocol of sampling on a device: logits to probabilities, filters, draws.

Shapes use S rows and V tokens. Probabilities are float32 and contiguous.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SamplingOperations(Protocol):
    """Sampling operations of one device. Results are new tensors."""

    def softmax(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """softmax(logits / temperature): float32[S, V], float32[S] above 0 -> float32[S, V]."""

    def keep_top_k(self, probabilities: Tensor, top_k: Tensor) -> Tensor:
        """The K most likely tokens of each row and those as likely as the last of them, normalized; int32[S] from 1."""

    def keep_top_p(self, probabilities: Tensor, top_p: Tensor) -> Tensor:
        """The fewest most likely tokens whose sum reaches ``top_p``, float32[S] in (0, 1], normalized."""

    def draw(self, probabilities: Tensor, seed: int, offset: int) -> Tensor:
        """One token a row, int32[S], in proportion to the probabilities, each row with a number of its own.

        The same seed and offset draw the same tokens. Calls take offsets ``DRAW_STRIDE`` apart.
        """


DRAW_STRIDE = 32
"""Distance between the offsets of two calls: random numbers a call may use a row, a multiple of 4 as Philox wants."""
