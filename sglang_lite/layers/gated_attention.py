"""Self-attention whose output is gated by a second half of the query projection."""

from __future__ import annotations

from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan, Operations, PackedLinear
from sglang_lite.layers.attention import AttentionShape


class GatedAttention:
    """Grouped-query attention with per-head norms of q and k; each head's output times sigmoid of its gate.

    Args:
        layer: index among the layers that keep KV.
        qkv_proj: hidden -> H * 2 D rows (per head the query, then the gate), then G * D of k, then of v.
        output_proj: H * D -> hidden.
        query_norm, key_norm: weights [D] of the norms applied per head before rotation.
    """

    __slots__ = ("_eps", "_key_norm", "_layer", "_ops", "_output_proj", "_qkv_proj", "_query_norm", "_shape")

    def __init__(
        self,
        ops: Operations,
        shape: AttentionShape,
        layer: int,
        qkv_proj: PackedLinear,
        output_proj: PackedLinear,
        *,
        query_norm: Tensor,
        key_norm: Tensor,
        norm_eps: float,
    ) -> None:
        self._ops = ops
        self._shape = shape
        self._layer = layer
        self._qkv_proj = qkv_proj
        self._output_proj = output_proj
        self._query_norm = query_norm
        self._key_norm = key_norm
        self._eps = norm_eps

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, plan: AttentionPlan) -> Tensor:
        """[T, hidden] -> [T, hidden]; writes keys and values of the tokens into the pool."""
        ops, shape = self._ops, self._shape
        size, num_heads, num_kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
        sizes = [2 * num_heads * size, num_kv_heads * size, num_kv_heads * size]
        wide, key, value = self._qkv_proj(x).split_with_sizes(sizes, -1)
        query, gate = wide.view(-1, num_heads, 2 * size).chunk(2, -1)
        query = ops.rms_norm(query, self._query_norm, self._eps)
        key = ops.rms_norm(key.view(-1, num_kv_heads, size), self._key_norm, self._eps)
        query, key = ops.rotary_neox(query, key, cos, sin)
        value = value.view(-1, num_kv_heads, size)
        mixed = ops.attention(query, key, value, pool, self._layer, plan, scale=shape.scale, sliding_window=None)
        return self._output_proj(mixed * gate.reshape(mixed.shape).sigmoid())
