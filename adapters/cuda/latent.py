"""Latent attention (MLA) on CUDA: absorbed queries over the rows as they lie in the pool, through FlashInfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan, OperationInputError
from sglang_lite.adapters.cuda.attention import CudaAttentionPlan
from sglang_lite.adapters.cuda.wheels import Wheels
from sglang_lite.adapters.cuda.wrappers import LatentVariant
from sglang_lite.adapters.latent import KeySelection, LatentProjection


@dataclass(frozen=True, slots=True)
class CudaLatentProjection:
    """Both halves of every head as views of the checkpoint's matrix.

    Attributes:
        key_up: [H, dn, R]. value_up: [H, R, dv].
    """

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


class CudaLatent:
    """See ``adapters.latent.LatentOperations``. Decode rows and chunks of prompts go through one kernel."""

    def __init__(self, wheels: Wheels) -> None:
        self._append: Any = wheels.flashinfer.page.append_paged_mla_kv_cache

    @property
    def selects_keys(self) -> bool:
        """No kernel is wired up for it: contexts end where a selection would begin."""
        return False

    def pack_projection(self, weight: Tensor, num_heads: int, nope_dim: int) -> LatentProjection:
        """Keep [H * (dn + dv), R] as it is."""
        by_head = weight.view(num_heads, -1, weight.shape[1])
        return CudaLatentProjection(by_head[:, :nope_dim], by_head[:, nope_dim:].transpose(1, 2))

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
        if not isinstance(plan, CudaAttentionPlan):
            raise TypeError(f"the plan must come from plan_attention of these operations, not {type(plan).__name__}")
        if not isinstance(projection, CudaLatentProjection):
            raise TypeError(f"the projection must come from pack_projection, not {type(projection).__name__}")
        step = plan.step
        if selection is not None and int(step.kv_lens.array.max()) > selection.top_k:
            raise OperationInputError(
                f"latent attention: a sequence of {int(step.kv_lens.array.max())} tokens needs a selection of "
                f"{selection.top_k} keys, which is not served on this device; lower --context-length"
            )
        latent_dim, rope_dim = projection.latent_dim, query_rope.shape[2]
        latents = pool[:, layer, 0, :, 0, :latent_dim]
        rotated = pool[:, layer, 0, :, 0, latent_dim : latent_dim + rope_dim]
        variant = LatentVariant(projection.num_heads, latent_dim, rope_dim, scale, query_nope.dtype, pool.dtype)
        ((wrapper, _),) = plan.wrappers(variant)
        stored = rows.to(pool.dtype)
        self._append(
            stored[:, :latent_dim],
            stored[:, latent_dim : latent_dim + rope_dim],
            step.batch_indices.device,
            step.positions.device,
            latents,
            rotated,
            step.kv_indices.device,
            step.kv_indptr.device,
            step.last_page_len.device,
        )
        absorbed = torch.bmm(query_nope.transpose(0, 1), projection.key_up).transpose(0, 1).contiguous()
        mixed = torch.empty_like(absorbed)
        wrapper.run(absorbed, latents, rotated, mixed, query_rope.contiguous())
        values = torch.bmm(mixed.transpose(0, 1), projection.value_up)
        return values.transpose(0, 1).reshape(values.shape[1], -1)
