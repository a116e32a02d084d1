"""Rows that come into a model as vectors instead of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GivenEmbeddings:
    """What the first layer reads of some tokens of a step.

    Attributes:
        rows: int64[n], positions among the step's tokens.
        values: float32[n, hidden].
    """

    rows: Tensor
    values: Tensor

    def put_into(self, embedded: Tensor) -> Tensor:
        """``embedded`` [T, hidden], what the embedding made of the tokens, with these rows replaced in place."""
        return embedded.index_copy_(0, self.rows, self.values.to(embedded.dtype))
