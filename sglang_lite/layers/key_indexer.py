"""The indexer of sparse attention: small queries and keys whose scores say which keys a query attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from sglang_lite.adapters.base import Operations, PackedLinear
from sglang_lite.adapters.latent import KeySelection

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerShape:
    """Extents of an indexer.

    Attributes:
        num_heads, head_dim: of the index queries.
        rope_dim: elements of a head that rotate, from the first on.
        top_k: keys a query keeps.
        is_interleaved: rotary pairs are neighbours.
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    top_k: int
    is_interleaved: bool


class KeyIndexer(Protocol):
    """Gives a layer its index keys and its choice."""

    def __call__(self, x: Tensor, compressed_query: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, KeySelection]:
        """[T, hidden] and [T, query rank] -> index keys [T, di] to keep with the tokens, and the queries' choice."""


class Indexer:
    """Index queries from the compressed query, one index key per token, and a weight for each index head.

    Args:
        query_proj: query rank -> n * di. key_proj: hidden -> di. weight_proj: hidden -> n.
        key_norm_weight, key_norm_bias: [di] of the layer norm over index keys.
    """

    __slots__ = ("_key_norm", "_key_proj", "_last", "_ops", "_query_proj", "_shape", "_weight_proj")

    def __init__(
        self,
        ops: Operations,
        shape: IndexerShape,
        query_proj: PackedLinear,
        key_proj: PackedLinear,
        weight_proj: PackedLinear,
        *,
        key_norm_weight: Tensor,
        key_norm_bias: Tensor,
    ) -> None:
        self._ops = ops
        self._shape = shape
        self._query_proj = query_proj
        self._key_proj = key_proj
        self._weight_proj = weight_proj
        self._key_norm = key_norm_weight, key_norm_bias
        self._last: tuple[Tensor, KeySelection] | None = None

    def __call__(self, x: Tensor, compressed_query: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, KeySelection]:
        """See ``KeyIndexer``."""
        shape, rotate = self._shape, self._ops.rotary_neox
        if shape.is_interleaved:
            rotate = self._ops.rotary_interleaved
        query = self._query_proj(compressed_query).view(-1, shape.num_heads, shape.head_dim)
        key = functional.layer_norm(self._key_proj(x), (shape.head_dim,), *self._key_norm, _NORM_EPS).unsqueeze(1)
        query, key = rotate(query, key, cos, sin)
        weights = self._weight_proj(x).float() * (shape.num_heads * shape.head_dim) ** -0.5
        self._last = key.squeeze(1), KeySelection(query, weights, shape.top_k)
        return self._last

    def last(self) -> tuple[Tensor, KeySelection]:
        """What the latest call gave."""
        if self._last is None:
            raise RuntimeError("the indexer of an earlier layer has not run in this step")
        return self._last


class SharedIndexer:
    """The choice of an earlier layer, for the layers behind it that have no indexer. They keep its index keys too."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Indexer) -> None:
        self._owner = owner

    def __call__(self, x: Tensor, compressed_query: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, KeySelection]:
        """See ``KeyIndexer``."""
        return self._owner.last()
