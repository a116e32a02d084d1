"""Mixture-of-experts operations in torch: the reference for every other device, and the path of ``--device cpu``."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.moe import SILU, AlignedTokens, ExpertActivation, PackedExperts, Routing
from sglang_lite.adapters.moe_reference import check_experts, gated_activation, route


class CpuMoE:
    """``MoEOperations`` on the host. Work is sorted by expert: loops run over the experts hit, not over tokens."""

    def route(self, logits: Tensor, routing: Routing, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts: (topk_ids int32[T, K], topk_weights float32[T, K])."""
        return route(logits, routing, correction_bias)

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
        return CpuExperts(w13, w2, activation, w13_bias, w2_bias, first_expert)

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


class CpuExperts:
    """The experts of one layer: two products an expert that some token chose."""

    def __init__(
        self,
        w13: Tensor,
        w2: Tensor,
        activation: ExpertActivation,
        w13_bias: Tensor | None,
        w2_bias: Tensor | None,
        first_expert: int,
    ) -> None:
        self._w13 = w13
        self._w2 = w2
        self._activation = activation
        self._w13_bias = w13_bias
        self._w2_bias = w2_bias
        self._first_expert = first_expert

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x [T, H], int32[T, K], float32[T, K] -> [T, H]."""
        num_tokens, top_k = topk_ids.shape
        num_experts = self._w13.shape[0]
        local = topk_ids.reshape(-1).long() - self._first_expert
        held = (local >= 0) & (local < num_experts)
        # Pairs of experts held elsewhere sort behind all others and are never computed.
        local = torch.where(held, local, num_experts)
        order = local.argsort(stable=True)
        counts = torch.bincount(local, minlength=num_experts + 1)[:num_experts].tolist()
        num_held = sum(counts)
        rows = x.index_select(0, order[:num_held] // top_k)
        outputs = x.new_empty(num_held, self._w2.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if count:
                outputs[start : start + count] = self._run(expert, rows[start : start + count])
                start += count
        pairs = x.new_zeros(num_tokens * top_k, outputs.shape[1]).index_copy_(0, order[:num_held], outputs)
        weighted = pairs.view(num_tokens, top_k, outputs.shape[1]).float().mul_(topk_weights.unsqueeze(-1))
        return weighted.sum(1).to(x.dtype)

    def _run(self, expert: int, rows: Tensor) -> Tensor:
        w13_bias = None if self._w13_bias is None else self._w13_bias[expert]
        w2_bias = None if self._w2_bias is None else self._w2_bias[expert]
        hidden = gated_activation(functional.linear(rows, self._w13[expert], w13_bias), self._activation)
        return functional.linear(hidden, self._w2[expert], w2_bias)
