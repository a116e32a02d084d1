"""Latent attention on the host: absorbed for decode and short chunks, keys and values expanded for long ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sglang_lite.adapters.base import AttentionBatch, AttentionPlan, KVGeometry, OperationInputError
from sglang_lite.adapters.cpu.attention import check_slots
from sglang_lite.adapters.cpu.key_selection import selection_mask
from sglang_lite.adapters.cpu.latent_plan import CpuLatentPlan, DecodeTile, LatentChunk, LatentPool, plan_latent
from sglang_lite.adapters.cpu.softmax_attention import attend, join
from sglang_lite.adapters.latent import KeySelection, LatentProjection

_EXPANDED_ELEMENTS = 1 << 26
"""Elements of expanded keys and values made at a time; more heads than fit take turns."""

_MASK_ELEMENTS = 1 << 24
"""Elements of a mask over a chunk's chosen keys; the queries of a longer chunk take turns."""


@dataclass(frozen=True, slots=True)
class CpuLatentProjection:
    """The matrix of a checkpoint as it is; both halves of every head are views of it.

    Attributes:
        weight: [H * (dn + dv), R].
        key_up: [H, dn, R].
        value_up: [H, R, dv].
    """

    weight: Tensor
    key_up: Tensor
    value_up: Tensor

    @property
    def num_heads(self) -> int:
        """H."""
        return self.key_up.shape[0]

    @property
    def nope_dim(self) -> int:
        """dn."""
        return self.key_up.shape[1]

    @property
    def value_dim(self) -> int:
        """dv."""
        return self.value_up.shape[2]

    @property
    def latent_dim(self) -> int:
        """R."""
        return self.key_up.shape[2]


@dataclass(slots=True)
class _Queries:
    """The queries of a step in one layer.

    Attributes:
        nope, rope: [T, H, dn] and [T, H, dr].
        scale: of the scores.
    """

    nope: Tensor
    rope: Tensor
    projection: CpuLatentProjection
    scale: float
    selection: KeySelection | None

    @property
    def key_width(self) -> int:
        """Elements of a row that take part in the scores: R + dr."""
        return self.projection.latent_dim + self.rope.shape[2]

    @property
    def head_width(self) -> int:
        """Elements of an expanded head's key or value, whichever is wider."""
        return max(self.projection.nope_dim + self.rope.shape[2], self.projection.value_dim)

    def absorbed(self, start: int, stop: int) -> Tensor:
        """[stop - start, H, R + dr]: queries that meet the rows of the pool."""
        latent_dim = self.projection.latent_dim
        query = self.nope.new_empty(stop - start, self.projection.num_heads, self.key_width)
        moved = torch.bmm(self.nope[start:stop].transpose(0, 1), self.projection.key_up)
        query[..., :latent_dim] = moved.transpose(0, 1)
        query[..., latent_dim:] = self.rope[start:stop]
        return query

    def values_of(self, latent: Tensor) -> Tensor:
        """Mixed latents [n, H, R] -> [n, H, dv]."""
        return torch.bmm(latent.transpose(0, 1), self.projection.value_up).transpose(0, 1)


class CpuLatentAttention:
    """``adapters.latent.LatentOperations`` in torch; owns the scratch memory that its steps share."""

    def __init__(self) -> None:
        self._pool: LatentPool | None = None

    def release(self) -> None:
        """Let go of the scratch memory; no step is under way."""
        self._pool = None

    @property
    def selects_keys(self) -> bool:
        """Always: contexts of any length."""
        return True

    def pack_projection(self, weight: Tensor, num_heads: int, nope_dim: int) -> LatentProjection:
        """Keep [H * (dn + dv), R] as it is."""
        by_head = weight.view(num_heads, -1, weight.shape[1])
        return CpuLatentProjection(weight, by_head[:, :nope_dim], by_head[:, nope_dim:].transpose(1, 2))

    def plan(self, batch: AttentionBatch, geometry: KVGeometry) -> CpuLatentPlan:
        """Indices of a step over a pool of latent rows.

        Raises:
            OperationInputError: an empty step, or a slot outside the pool.
        """
        check_slots(batch.slot_mapping, geometry)
        if self._pool is None or self._pool.geometry != geometry:
            self._pool = LatentPool(geometry)
        return plan_latent(self._pool, batch)

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
        """Append the rows, attend. Returns [T, H * dv]."""
        if not isinstance(plan, CpuLatentPlan):
            raise OperationInputError(
                f"latent attention needs a plan made for a pool of latent rows (plan_attention with a geometry of one "
                f"tensor), not {type(plan).__name__}"
            )
        if not isinstance(projection, CpuLatentProjection):
            raise TypeError(f"the projection must come from pack_projection, not {type(projection).__name__}")
        plan.pool.vectors(pool).index_copy_(0, plan.write_rows[layer], rows.to(pool.dtype))
        queries = _Queries(query_nope, query_rope, projection, scale, selection)
        output = query_nope.new_empty(query_nope.shape[0], projection.num_heads, projection.value_dim)
        if plan.num_decode:
            output[: plan.num_decode] = _decode(plan, queries, pool, layer)
        for chunk in plan.chunks:
            whole = rows[chunk.tokens] if not chunk.prefix_len else plan.pool.read_chunk(pool, chunk, layer)
            _attend_chunk(chunk, queries, whole.to(query_nope.dtype), output[chunk.tokens])
        return output.view(output.shape[0], -1)


def _decode(plan: CpuLatentPlan, queries: _Queries, pool: Tensor, layer: int) -> Tensor:
    """One query for each of the first ``num_decode`` rows: [n, H, dv]. The heads share the keys, read once."""
    query = queries.absorbed(0, plan.num_decode)
    if plan.order is not None:
        query = query.index_select(0, plan.order)
    mixed = torch.empty_like(query)
    for tile in plan.tiles:
        rows = plan.pool.read_tile(pool, tile, layer).to(query.dtype)
        keys = rows[:, None, :, : queries.key_width]
        mask = _decode_mask(plan, tile, queries, rows)
        part, _ = attend(query[tile.places].unsqueeze(1), keys, keys, scale=queries.scale, mask=mask)
        mixed[tile.places] = part.squeeze(1)
    if plan.order is not None:
        mixed = torch.empty_like(mixed).index_copy_(0, plan.order, mixed)
    return queries.values_of(mixed[..., : queries.projection.latent_dim])


def _decode_mask(plan: CpuLatentPlan, tile: DecodeTile, queries: _Queries, rows: Tensor) -> Tensor | None:
    """[n, 1, 1, W], or None when every row sees all of the tile's keys."""
    selection = queries.selection
    if selection is None or tile.width <= selection.top_k:
        return tile.mask(queries.nope.dtype)
    places = torch.arange(tile.places.start, tile.places.stop) if plan.order is None else plan.order[tile.places]
    visible = torch.arange(tile.width) < tile.lengths.unsqueeze(1)
    mask = selection_mask(
        selection.query[places].unsqueeze(1),
        selection.weights[places].unsqueeze(1),
        rows[..., queries.key_width :],
        visible.unsqueeze(1),
        selection.top_k,
    )
    return mask.unsqueeze(1).to(queries.nope.dtype)


def _attend_chunk(chunk: LatentChunk, queries: _Queries, rows: Tensor, output: Tensor) -> None:
    """A prefill chunk over the rows [kv_len, D] of its sequence, into [n, H, dv]."""
    selection = queries.selection
    if selection is None or chunk.kv_len <= selection.top_k:
        _attend_piece(chunk, queries, rows, None, output)
        return
    for piece in chunk.pieces(max(1, _MASK_ELEMENTS // chunk.kv_len)):
        positions = torch.arange(piece.kv_len)
        mask = selection_mask(
            selection.query[piece.tokens].unsqueeze(0),
            selection.weights[piece.tokens].unsqueeze(0),
            rows[None, : piece.kv_len, queries.key_width :],
            (positions <= positions[piece.prefix_len :].unsqueeze(1)).unsqueeze(0),
            selection.top_k,
        )
        part = output[piece.start - chunk.start : piece.stop - chunk.start]
        _attend_piece(piece, queries, rows[: piece.kv_len], mask.unsqueeze(1).to(rows.dtype), part)


def _attend_piece(chunk: LatentChunk, queries: _Queries, rows: Tensor, mask: Tensor | None, output: Tensor) -> None:
    """A chunk under a mask [1, 1, n, kv_len], or plain causality."""
    if not _expanding_pays(chunk, queries):
        output.copy_(_absorbed(chunk, queries, rows, mask))
        return
    heads_at_once = max(1, _EXPANDED_ELEMENTS // (rows.shape[0] * 2 * queries.head_width))
    for first in range(0, output.shape[1], heads_at_once):
        heads = slice(first, min(first + heads_at_once, output.shape[1]))
        output[:, heads] = _expanded(chunk, queries, rows, mask, heads)


def _expanding_pays(chunk: LatentChunk, queries: _Queries) -> bool:
    """Whether making every head's keys and values costs fewer multiplications than scores over whole rows."""
    projection, length, rope_dim = queries.projection, chunk.stop - chunk.start, queries.rope.shape[2]
    head_dims = projection.nope_dim + projection.value_dim
    latent_dim = projection.latent_dim
    expanded = length * chunk.kv_len * (head_dims + rope_dim) + chunk.kv_len * latent_dim * head_dims
    absorbed = length * chunk.kv_len * 2 * (latent_dim + rope_dim) + length * latent_dim * head_dims
    return expanded < absorbed


def _absorbed(chunk: LatentChunk, queries: _Queries, rows: Tensor, mask: Tensor | None) -> Tensor:
    """[n, H, dv] by queries that meet the rows as they are."""
    query = queries.absorbed(chunk.start, chunk.stop).transpose(0, 1).unsqueeze(0)
    keys = rows[:, : queries.key_width].expand(1, queries.projection.num_heads, -1, -1)
    mixed = _attend_past(chunk, queries.scale, query, keys, keys, mask)
    return queries.values_of(mixed[..., : queries.projection.latent_dim])


def _expanded(chunk: LatentChunk, queries: _Queries, rows: Tensor, mask: Tensor | None, heads: slice) -> Tensor:
    """[n, heads, dv] by a key and a value for every position and each of these heads."""
    projection = queries.projection
    nope_dim, latent_dim, num_heads = projection.nope_dim, projection.latent_dim, heads.stop - heads.start
    weight = projection.weight.view(projection.num_heads, -1, latent_dim)[heads].flatten(0, 1)
    both = torch.mm(rows[:, :latent_dim], weight.t()).view(rows.shape[0], num_heads, -1)
    shared = rows[:, None, latent_dim : queries.key_width].expand(-1, num_heads, -1)
    keys = torch.cat([both[..., :nope_dim], shared], -1)
    query = torch.cat([queries.nope[chunk.tokens, heads], queries.rope[chunk.tokens, heads]], -1)
    # The kernel wants one width; zeros change nothing.
    padded = (functional.pad(x, (0, queries.head_width - x.shape[-1])) for x in (query, keys, both[..., nope_dim:]))
    query, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in padded)
    return _attend_past(chunk, queries.scale, query, keys, values, mask)[..., : projection.value_dim]


def _attend_past(
    chunk: LatentChunk, scale: float, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """[1, H, n, D] queries at the end of [1, H, kv_len, D] keys -> [n, H, D].

    Without a mask the prefix, which all queries see, and the chunk itself are attended to apart: a mask over both
    would have an element for every pair.
    """
    prefix = chunk.prefix_len
    if mask is not None:
        mixed, _ = attend(query, keys, values, scale=scale, mask=mask)
    else:
        mixed, log_sum = attend(query, keys[:, :, prefix:], values[:, :, prefix:], scale=scale, causal=True)
        if prefix:
            before, before_log_sum = attend(query, keys[:, :, :prefix], values[:, :, :prefix], scale=scale)
            mixed = join(mixed, log_sum, before, before_log_sum)
    return mixed[0].transpose(0, 1)
