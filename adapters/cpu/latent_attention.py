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
from sglang_lite.adapters.cpu.softmax_attention import attend
from sglang_lite.adapters.latent import KeySelection, LatentProjection


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
        if not isinstance(plan, CpuLatentPlan) or self._pool is None:
            raise OperationInputError(
                f"latent attention needs a plan made for a pool of latent rows (plan_attention with a geometry of one "
                f"tensor), not {type(plan).__name__}"
            )
        if not isinstance(projection, CpuLatentProjection):
            raise TypeError(f"the projection must come from pack_projection, not {type(projection).__name__}")
        reader = self._pool
        reader.vectors(pool).index_copy_(0, plan.write_rows[layer], rows.to(pool.dtype))
        queries = _Queries(query_nope, query_rope, projection, scale, selection)
        output = query_nope.new_empty(query_nope.shape[0], projection.num_heads, projection.value_dim)
        if plan.num_decode:
            output[: plan.num_decode] = _decode(plan, reader, queries, pool, layer)
        for chunk in plan.chunks:
            whole = rows[chunk.start : chunk.stop] if not chunk.prefix_len else reader.read_chunk(pool, chunk, layer)
            attend_chunk = _expanded if _expanding_pays(chunk, queries) else _absorbed
            output[chunk.start : chunk.stop] = attend_chunk(chunk, queries, whole.to(query_nope.dtype))
        return output.view(output.shape[0], -1)


def _decode(plan: CpuLatentPlan, reader: LatentPool, queries: _Queries, pool: Tensor, layer: int) -> Tensor:
    """One query for each of the first ``num_decode`` rows: [n, H, dv]. The heads share the keys, read once."""
    query = queries.absorbed(0, plan.num_decode)
    if plan.order is not None:
        query = query.index_select(0, plan.order)
    mixed = torch.empty_like(query)
    for tile in plan.tiles:
        rows = reader.read_tile(pool, tile, layer).to(query.dtype)
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


def _expanding_pays(chunk: LatentChunk, queries: _Queries) -> bool:
    """Whether making every head's keys and values costs fewer multiplications than scores over whole rows."""
    projection, length, rope_dim = queries.projection, chunk.stop - chunk.start, queries.rope.shape[2]
    head_dims = projection.nope_dim + projection.value_dim
    latent_dim = projection.latent_dim
    expanded = length * chunk.kv_len * (head_dims + rope_dim) + chunk.kv_len * latent_dim * head_dims
    absorbed = length * chunk.kv_len * 2 * (latent_dim + rope_dim) + length * latent_dim * head_dims
    return expanded < absorbed


def _absorbed(chunk: LatentChunk, queries: _Queries, rows: Tensor) -> Tensor:
    """Queries of a chunk over the rows [kv_len, D] of its sequence: [n, H, dv]."""
    query = queries.absorbed(chunk.start, chunk.stop).transpose(0, 1).unsqueeze(0)
    keys = rows[:, : queries.key_width].expand(1, queries.projection.num_heads, -1, -1)
    mixed = _attend_chunk(chunk, queries, rows, query, keys, keys)
    return queries.values_of(mixed[..., : queries.projection.latent_dim])


def _expanded(chunk: LatentChunk, queries: _Queries, rows: Tensor) -> Tensor:
    """As ``_absorbed``, with a key and a value for every head and position."""
    projection = queries.projection
    nope_dim, latent_dim = projection.nope_dim, projection.latent_dim
    heads = torch.mm(rows[:, :latent_dim], projection.weight.t()).view(rows.shape[0], projection.num_heads, -1)
    shared = rows[:, None, latent_dim : queries.key_width].expand(-1, projection.num_heads, -1)
    keys = torch.cat([heads[..., :nope_dim], shared], -1)
    span = slice(chunk.start, chunk.stop)
    query = torch.cat([queries.nope[span], queries.rope[span]], -1)
    width = max(keys.shape[-1], projection.value_dim)  # the kernel wants one width; zeros change nothing
    query, keys, values = (functional.pad(x, (0, width - x.shape[-1])) for x in (query, keys, heads[..., nope_dim:]))
    by_head = (x.transpose(0, 1).unsqueeze(0) for x in (query, keys, values))
    return _attend_chunk(chunk, queries, rows, *by_head)[..., : projection.value_dim]


def _attend_chunk(
    chunk: LatentChunk, queries: _Queries, rows: Tensor, query: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """[1, H, n, D] queries at the end of [1, H, kv_len, D] keys -> [n, H, D]."""
    selection = queries.selection
    mask: Tensor | None
    if selection is not None and chunk.kv_len > selection.top_k:
        span = slice(chunk.start, chunk.stop)
        mask = selection_mask(
            selection.query[span].unsqueeze(0),
            selection.weights[span].unsqueeze(0),
            rows[None, :, queries.key_width :],
            chunk.visible().unsqueeze(0),
            selection.top_k,
        ).unsqueeze(1)
    else:
        mask = chunk.mask()
    if mask is not None:
        mask = mask.to(query.dtype)
    mixed, _ = attend(query, keys, values, scale=queries.scale, mask=mask, causal=mask is None)
    return mixed[0].transpose(0, 1)
