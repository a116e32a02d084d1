"""Self-attention of a decoder layer with grouped key/value heads over the paged pool."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan, Operations, PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Extents of an attention layer; ``scale`` multiplies the scores before the softmax."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


class Attention:
    """Merged q/k/v projection, optional per-head norms of q and k, rotary embedding, paged attention, output.

    Args:
        layer: index of this layer in the pool.
        qkv_proj: hidden -> (H + 2 G) * D, the rows of q, then k, then v.
        output_proj: H * D -> hidden.
        query_norm, key_norm: weights [D] of the norms applied per head before rotation, or both None.
        sliding_window: keys a query sees, itself included; None for all.
        sinks: float32[H], one more logit a head in the softmax's denominator; None without.
        score_cap: c of c * tanh(s / c) on the scaled scores; None without.
    """

    __slots__ = (
        "_head_dim",
        "_key_norm",
        "_layer",
        "_norm_eps",
        "_num_total_heads",
        "_ops",
        "_output_proj",
        "_qkv_proj",
        "_query_norm",
        "_scale",
        "_score_cap",
        "_sinks",
        "_sliding_window",
        "_split_sizes",
    )

    def __init__(
        self,
        ops: Operations,
        shape: AttentionShape,
        layer: int,
        qkv_proj: PackedLinear,
        output_proj: PackedLinear,
        *,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        norm_eps: float,
        sliding_window: int | None,
        sinks: Tensor | None = None,
        score_cap: float | None = None,
    ) -> None:
        self._ops = ops
        self._layer = layer
        self._qkv_proj = qkv_proj
        self._output_proj = output_proj
        self._query_norm = query_norm
        self._key_norm = key_norm
        self._norm_eps = norm_eps
        self._sliding_window = sliding_window
        self._sinks = sinks
        self._score_cap = score_cap
        self._scale = shape.scale
        self._head_dim = shape.head_dim
        self._split_sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self._num_total_heads = sum(self._split_sizes)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, plan: AttentionPlan) -> Tensor:
        """[T, hidden] -> [T, hidden]; writes keys and values of the tokens into the pool."""
        ops = self._ops
        heads = self._qkv_proj(x).view(-1, self._num_total_heads, self._head_dim)
        query, key, value = heads.split_with_sizes(self._split_sizes, 1)
        if self._query_norm is not None and self._key_norm is not None:
            query = ops.rms_norm(query, self._query_norm, self._norm_eps)
            key = ops.rms_norm(key, self._key_norm, self._norm_eps)
        query, key = ops.rotary_neox(query, key, cos, sin)
        mixed = ops.attention(
            query,
            key,
            value,
            pool,
            self._layer,
            plan,
            scale=self._scale,
            sliding_window=self._sliding_window,
            sinks=self._sinks,
            logit_cap=self._score_cap,
        )
        return self._output_proj(mixed)
