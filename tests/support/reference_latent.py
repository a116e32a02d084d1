"""Latent attention written as plainly as possible: every head's keys and values are made, one row at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch, AttentionPlan
from sglang_lite.adapters.latent import KeySelection, LatentProjection


@dataclass(frozen=True, slots=True)
class ReferencePlan(AttentionPlan):
    """Everything of the step, unprepared."""

    batch: AttentionBatch
    page_size: int


@dataclass(frozen=True, slots=True)
class ReferenceProjection:
    """``key_up`` [H, dn, R] and ``value_up`` [H, dv, R]."""

    key_up: Tensor
    value_up: Tensor

    @property
    def num_heads(self) -> int:
        return self.key_up.shape[0]

    @property
    def nope_dim(self) -> int:
        return self.key_up.shape[1]

    @property
    def value_dim(self) -> int:
        return self.value_up.shape[1]

    @property
    def latent_dim(self) -> int:
        return self.key_up.shape[2]


class ReferenceLatent:
    """See ``sglang_lite.adapters.latent.LatentOperations`` for the contracts."""

    selects_keys = True

    def pack_projection(self, weight: Tensor, num_heads: int, nope_dim: int) -> LatentProjection:
        by_head = weight.view(num_heads, -1, weight.shape[1])
        return ReferenceProjection(by_head[:, :nope_dim], by_head[:, nope_dim:])

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
        assert isinstance(plan, ReferencePlan)
        assert isinstance(projection, ReferenceProjection)
        batch, page_size = plan.batch, plan.page_size
        for token, slot in enumerate(batch.slot_mapping.tolist()):
            page, offset = divmod(slot, page_size)
            pool[page, layer, 0, offset, 0] = rows[token]
        query = torch.cat([query_nope, query_rope], -1).float()
        outputs = []
        start = 0
        for row, (query_len, kv_len) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
            pages = batch.page_table[row, : -(-kv_len // page_size)]
            stored = pool[pages, layer, 0, :, 0].flatten(0, 1)[:kv_len].float()
            part = slice(start, start + query_len)
            visible = _visible(selection, part, stored, projection.latent_dim + query_rope.shape[2])
            outputs.append(_attend(query[part], stored, projection, visible, scale))
            start += query_len
        return torch.cat(outputs).flatten(1).to(query_nope.dtype)


def _attend(query: Tensor, stored: Tensor, projection: ReferenceProjection, visible: Tensor, scale: float) -> Tensor:
    """float32 [Q, H, dn + dr] against stored rows [N, ...]: [Q, H, dv]."""
    latent_dim, rope_dim = projection.latent_dim, query.shape[2] - projection.nope_dim
    latent, shared = stored[:, :latent_dim], stored[:, latent_dim : latent_dim + rope_dim]
    keys = torch.einsum("kr,hdr->khd", latent, projection.key_up.float())
    keys = torch.cat([keys, shared[:, None].expand(-1, projection.num_heads, -1)], -1)
    values = torch.einsum("kr,hdr->khd", latent, projection.value_up.float())
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    probabilities = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probabilities, values)


def _visible(selection: KeySelection | None, queries: slice, stored: Tensor, key_width: int) -> Tensor:
    """bool[Q, N]: causal, and among the best of the index scores."""
    num_queries, num_keys = queries.stop - queries.start, stored.shape[0]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    if selection is None:
        return visible
    for place, token in enumerate(range(queries.start, queries.stop)):
        by_head = torch.relu(selection.query[token].float() @ stored[:, key_width:].T)
        scores = (selection.weights[token] @ by_head).masked_fill(~visible[place], float("-inf"))
        best = scores.argsort(descending=True, stable=True)[: selection.top_k]
        visible[place] &= torch.zeros(num_keys, dtype=torch.bool).index_fill(0, best, True)
    return visible
