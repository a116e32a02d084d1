"""Mixture-of-experts operations in torch: the reference for every other device, and the path of ``--device cpu``."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.moe import SILU, AlignedTokens, ExpertActivation, PackedExperts, Routing
from sglang_lite.adapters.moe_reference import check_experts, plain_experts, route, top_indices_on_host


class CpuMoE:
    """``MoEOperations`` on the host. Work is sorted by expert: loops run over the experts hit, not over tokens."""

    def route(self, logits: Tensor, routing: Routing, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts: (topk_ids int32[T, K], topk_weights float32[T, K])."""
        return route(logits, routing, correction_bias, top_indices_on_host)

    def align(self, topk_ids: Tensor, num_experts: int, block_size: int) -> AlignedTokens:
        """Sort pairs by expert, pad each run to whole blocks; expert -1 first."""
        flat = topk_ids.reshape(-1).long()
        num_pairs = flat.numel()
        bucket = torch.where((flat >= 0) & (flat < num_experts), flat + 1, 0)
        counts = torch.bincount(bucket, minlength=num_experts + 1)
        padded = (counts + block_size - 1) // block_size * block_size
        ends = padded.cumsum(0)
        capacity = int(ends[-1])
        sorted_pairs = torch.full((capacity,), num_pairs, dtype=torch.int32)
        order = bucket.argsort(stable=True)
        rank_in_bucket = torch.arange(num_pairs) - (counts.cumsum(0) - counts)[bucket[order]]
        sorted_pairs[(ends - padded)[bucket[order]] + rank_in_bucket] = order.to(torch.int32)
        block_experts = (torch.arange(num_experts + 1) - 1).repeat_interleave(padded // block_size)
        return AlignedTokens(sorted_pairs, block_experts.to(torch.int32), ends[-1:].to(torch.int32))

    def grouped_gemm(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """Rows offsets[e]..offsets[e+1] of x [M, K] times weight[e]^T of [E, N, K] -> [M, N]."""
        bounds = offsets.tolist()
        if len(bounds) != weight.shape[0] + 1 or bounds[0] != 0 or bounds[-1] != x.shape[0]:
            raise OperationInputError(
                f"offsets must be {weight.shape[0] + 1} row bounds from 0 to {x.shape[0]}, got {bounds}"
            )
        out = x.new_empty(x.shape[0], weight.shape[1])
        for expert, (start, end) in enumerate(pairwise(bounds)):
            if start != end:
                torch.mm(x[start:end], weight[expert].t(), out=out[start:end])
        return out

    def pack_experts(
        self,
        w13: Tensor,
        w2: Tensor,
        *,
        activation: ExpertActivation = SILU,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        first_expert: int = 0,
        total_experts: int | None = None,
    ) -> PackedExperts:
        """Keep the weights as they are."""
        check_experts(w13, w2, w13_bias, w2_bias, first_expert, total_experts)
        return plain_experts(w13, w2, activation, w13_bias, w2_bias, first_expert)

    def fused_experts(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w13: Tensor,
        w2: Tensor,
        *,
        activation: ExpertActivation = SILU,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
    ) -> Tensor:
        """Every token through its experts, weighted and added up: [T, H]."""
        experts = self.pack_experts(w13, w2, activation=activation, w13_bias=w13_bias, w2_bias=w2_bias)
        return experts(x, topk_ids, topk_weights)
