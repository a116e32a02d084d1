"""Protocol of latent attention (MLA): all heads read one compressed row per token.

Shapes use T tokens of a step, H query heads, R latent width, dn and dr widths of a query head without and with rotary
embedding, dv width of a head's value. A token leaves one row in the pool: its normalised latent c [R], then the
rotated key part that all heads share [dr], then, for models that select keys, an index key [di].

A head's key is [W_key c | k_rope] and its value W_value c. Both products can move to the query's side ("absorbed"):
the query [q_nope W_key | q_rope] of width R + dr meets the row as it lies in the pool, and W_value is applied to the
mixed latent. Absorbed suits decode, which is bound by reading rows; long chunks may expand keys and values instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from sglang_lite.adapters.base import AttentionPlan


@dataclass(frozen=True, slots=True)
class KeySelection:
    """Which keys a query attends to: those with the best index scores.

    The score of key k for query q is sum over the index heads of weight_h * relu(q_h . k), in float32. A query that
    has no more than ``top_k`` keys attends to all of them.

    Attributes:
        query: [T, n, di], of n index heads.
        weights: float32[T, n], every constant factor included.
        top_k: keys that are kept.
    """

    query: Tensor
    weights: Tensor
    top_k: int


class LatentProjection(Protocol):
    """W_key and W_value of all heads, prepared for this device."""

    @property
    def num_heads(self) -> int: ...

    @property
    def nope_dim(self) -> int: ...

    @property
    def value_dim(self) -> int: ...

    @property
    def latent_dim(self) -> int: ...


class LatentOperations(Protocol):
    """Latent attention of one device. The step's plan comes from ``Operations.plan_attention`` with a latent pool."""

    @property
    def selects_keys(self) -> bool:
        """Whether queries with more than ``KeySelection.top_k`` keys are served; if not, they are an input error."""

    def pack_projection(self, weight: Tensor, num_heads: int, nope_dim: int) -> LatentProjection:
        """Take over ``weight`` [H * (dn + dv), R]: for each head the dn rows of W_key, then the dv rows of W_value."""

    def attention(
        self,
        query_nope: Tensor,
        query_rope: Tensor,
        rows: Tensor,
        projection: LatentProjection,
        pool: Tensor,
        layer: int,
        plan: AttentionPlan,
        *,
        scale: float,
        selection: KeySelection | None = None,
    ) -> Tensor:
        """Append the rows to the pool, then attend causally over the paged sequences.

        query_nope [T, H, dn] and query_rope [T, H, dr] (rotated already), any strides but the last; rows
        [T, R + dr (+ di)], contiguous; pool [pages, layers, 1, page_size, 1, R + dr (+ di)], written at this layer.
        ``scale`` multiplies the scores (it belongs to the width dn + dr). Returns a new [T, H * dv].
        """
