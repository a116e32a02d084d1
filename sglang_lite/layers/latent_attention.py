"""Self-attention with a latent row per token (MLA, arXiv 2405.04434) over the paged pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan, Operations, PackedLinear
from sglang_lite.adapters.latent import LatentProjection
from sglang_lite.layers.key_indexer import KeyIndexer


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Extents of this rank's part of a layer; ``scale`` multiplies the scores before the softmax.

    Attributes:
        num_heads: query heads of this rank.
        latent_dim, nope_dim, rope_dim: widths of the latent, of a query head's part that never rotates, of the rest.
        rotates: whether the rest rotates.
        is_interleaved: rotary pairs are neighbours; else half the rotary width apart.
    """

    num_heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    scale: float
    rotates: bool = True
    is_interleaved: bool = True


class DirectQuery:
    """Queries and latent rows projected from the hidden state at once.

    Args:
        query_proj: hidden -> H * (dn + dr). latent_proj: hidden -> R + dr.
    """

    __slots__ = ("_latent_proj", "_query_proj")

    def __init__(self, query_proj: PackedLinear, latent_proj: PackedLinear) -> None:
        self._query_proj = query_proj
        self._latent_proj = latent_proj

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden] -> queries [T, H * (dn + dr)], latent rows [T, R + dr], and the input itself."""
        return self._query_proj(x), self._latent_proj(x), x


class CompressedQuery:
    """Queries that pass through a narrow normalised vector; it and the latent rows are one projection.

    Args:
        down_proj: hidden -> query rank + R + dr. norm: [query rank]. up_proj: query rank -> H * (dn + dr).
    """

    __slots__ = ("_down_proj", "_eps", "_norm", "_ops", "_rank", "_up_proj")

    def __init__(
        self, ops: Operations, down_proj: PackedLinear, norm: Tensor, up_proj: PackedLinear, eps: float
    ) -> None:
        self._ops = ops
        self._down_proj = down_proj
        self._norm = norm
        self._up_proj = up_proj
        self._eps = eps
        self._rank = norm.shape[0]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As ``DirectQuery``; the third is the normalised vector [T, query rank]."""
        down = self._down_proj(x)
        compressed = self._ops.rms_norm(down[:, : self._rank], self._norm, self._eps)
        return self._up_proj(compressed), down[:, self._rank :], compressed


class LatentAttention:
    """Queries, one latent row per token, rotary embedding of their last parts, paged attention, output.

    Args:
        layer: index of this layer in the pool.
        queries: makes queries and latent rows.
        latent_norm: weight [R] of the norm over latents.
        projection: what makes a head's key and value of a latent.
        output_proj: H * dv -> hidden, summed over the ranks.
        indexer: chooses the keys that queries attend to; None for all.
    """

    __slots__ = (
        "_indexer",
        "_latent_norm",
        "_layer",
        "_norm_eps",
        "_ops",
        "_output_proj",
        "_projection",
        "_queries",
        "_shape",
    )

    def __init__(
        self,
        ops: Operations,
        shape: LatentShape,
        layer: int,
        queries: DirectQuery | CompressedQuery,
        projection: LatentProjection,
        output_proj: PackedLinear,
        *,
        latent_norm: Tensor,
        norm_eps: float,
        indexer: KeyIndexer | None = None,
    ) -> None:
        self._ops = ops
        self._shape = shape
        self._layer = layer
        self._queries = queries
        self._projection = projection
        self._output_proj = output_proj
        self._latent_norm = latent_norm
        self._norm_eps = norm_eps
        self._indexer = indexer

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, plan: AttentionPlan) -> Tensor:
        """[T, hidden] -> [T, hidden]; writes the tokens' rows into the pool. Without rotation cos and sin go unused."""
        ops, shape = self._ops, self._shape
        query, down, compressed = self._queries(x)
        query = query.view(-1, shape.num_heads, shape.nope_dim + shape.rope_dim)
        query_nope, query_rope = query.split_with_sizes([shape.nope_dim, shape.rope_dim], -1)
        latent = ops.rms_norm(down[:, : shape.latent_dim], self._latent_norm, self._norm_eps)
        key_rope = down[:, None, shape.latent_dim :]
        if shape.rotates:
            rotate = ops.rotary_interleaved if shape.is_interleaved else ops.rotary_neox
            query_rope, key_rope = rotate(query_rope, key_rope, cos, sin)
        parts, selection = [latent, key_rope.squeeze(1)], None
        if self._indexer is not None:
            index_key, selection = self._indexer(x, compressed, cos, sin)
            parts.append(index_key)
        mixed = ops.latent.attention(
            query_nope,
            query_rope,
            torch.cat(parts, -1),
            self._projection,
            pool,
            self._layer,
            plan,
            scale=shape.scale,
            selection=selection,
        )
        return self._output_proj(mixed)
