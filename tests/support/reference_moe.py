"""Mixture-of-experts operations one token at a time: the oracle for every optimised implementation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_lite.adapters.moe import (
    SILU,
    ActivationKind,
    AlignedTokens,
    ExpertActivation,
    GroupScore,
    Routing,
    Scoring,
)


@dataclass(frozen=True, slots=True)
class ReferenceExperts:
    """The experts of a layer, unprepared."""

    w13: Tensor
    w2: Tensor
    activation: ExpertActivation
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    first_expert: int

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        rows = []
        for token, ids, weights in zip(x.float(), topk_ids.tolist(), topk_weights.tolist(), strict=True):
            row = torch.zeros_like(token)
            for expert, weight in zip(ids, weights, strict=True):
                local = expert - self.first_expert
                if expert >= 0 and 0 <= local < len(self.w13):
                    row = row + weight * self._expert(token, local)
            rows.append(row)
        return torch.stack(rows).to(x.dtype)

    def _expert(self, token: Tensor, expert: int) -> Tensor:
        hidden = self.w13[expert].float() @ token
        if self.w13_bias is not None:
            hidden = hidden + self.w13_bias[expert].float()
        output = self.w2[expert].float() @ self._activate(hidden)
        return output if self.w2_bias is None else output + self.w2_bias[expert].float()

    def _activate(self, hidden: Tensor) -> Tensor:
        if self.activation.interleaved:
            gate, up = hidden.view(-1, 2).unbind(1)
        else:
            gate, up = hidden.view(2, -1).unbind(0)
        if self.activation.kind is ActivationKind.CLAMPED_SWIGLU:
            limit = self.activation.limit
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
            return gate / (1 + torch.exp(-self.activation.alpha * gate)) * (up + 1)
        if self.activation.kind is ActivationKind.GELU_TANH:
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        return gate / (1 + torch.exp(-gate)) * up


class ReferenceMoE:
    """See ``sglang_lite.adapters.moe.MoEOperations`` for the contracts."""

    def route(self, logits: Tensor, routing: Routing, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        chosen = [_route(row.float(), routing, correction_bias) for row in logits]
        ids = torch.tensor([ids for ids, _ in chosen], dtype=torch.int32)
        return ids, torch.tensor([weights for _, weights in chosen], dtype=torch.float32)

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
    ) -> ReferenceExperts:
        return ReferenceExperts(w13, w2, activation, w13_bias, w2_bias, first_expert)

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
        experts = ReferenceExperts(w13, w2, activation, w13_bias, w2_bias, 0)
        return experts(x, topk_ids, topk_weights)

    def align(self, topk_ids: Tensor, num_experts: int, block_size: int) -> AlignedTokens:
        raise NotImplementedError("models do not call it")

    def grouped_gemm(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        raise NotImplementedError("models do not call it")


def _route(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[list[int], list[float]]:
    """Experts and weights of one token, float32[E] logits."""
    if routing.scoring is Scoring.SIGMOID:
        scores = 1 / (1 + torch.exp(-logits))
    elif routing.scoring is Scoring.SOFTMAX:
        scores = torch.exp(logits) / torch.exp(logits).sum()
    else:
        scores = logits
    choice = (scores if bias is None else scores + bias).tolist()
    size = len(choice) // routing.num_groups
    members = [range(group * size, (group + 1) * size) for group in range(routing.num_groups)]

    def group_score(group: range) -> float:
        best: list[float] = sorted((choice[expert] for expert in group), reverse=True)
        return sum(best[:2]) if routing.group_score is GroupScore.TOP_2_SUM else best[0]

    kept = sorted(members, key=group_score, reverse=True)[: routing.kept_groups]
    ids = sorted((expert for group in kept for expert in group), key=lambda e: (-choice[e], e))[: routing.top_k]
    weights = scores[ids]
    if routing.scoring is Scoring.TOP_K_SOFTMAX:
        weights = torch.exp(weights) / torch.exp(weights).sum()
    if routing.renormalize:
        weights = weights / (weights.sum() + routing.epsilon)
    return ids, (weights * routing.scaling).tolist()
