"""Mixture-of-experts operations in torch: the reference for every other device, and the path of ``--device cpu``."""

from __future__ import annotations

from itertools import pairwise
from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.moe import (
    SILU,
    ActivationKind,
    AlignedTokens,
    ExpertActivation,
    GroupScore,
    PackedExperts,
    Routing,
    Scoring,
)


class CpuMoE:
    """``MoEOperations`` on the host. Work is sorted by expert: loops run over the experts hit, not over tokens."""

    def route(self, logits: Tensor, routing: Routing, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts: (topk_ids int32[T, K], topk_weights float32[T, K])."""
        check_routing(routing, logits.shape[-1])
        logits = logits.float()
        if routing.scoring is Scoring.TOP_K_SOFTMAX:
            ids = _top_indices(logits if correction_bias is None else logits + correction_bias, routing.top_k)
            weights = logits.gather(-1, ids).softmax(-1)
            return ids.to(torch.int32), weights.mul_(routing.scaling) if routing.scaling != 1.0 else weights
        scores = logits.softmax(-1) if routing.scoring is Scoring.SOFTMAX else logits.sigmoid()
        choice = scores if correction_bias is None else scores + correction_bias.float()
        if routing.num_groups > 1:
            choice = _keep_best_groups(choice, routing)
        ids = _top_indices(choice, routing.top_k)
        weights = scores.gather(-1, ids)
        if routing.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
        if routing.scaling != 1.0:
            weights = weights * routing.scaling
        return ids.to(torch.int32), weights

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


def gated_activation(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    """[M, 2I] -> [M, I]."""
    if activation.interleaved:
        gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, -1)
    match activation.kind:
        case ActivationKind.SILU:
            return functional.silu(gate) * up
        case ActivationKind.GELU_TANH:
            return functional.gelu(gate, approximate="tanh") * up
        case ActivationKind.CLAMPED_SWIGLU:
            gate = gate.clamp(max=activation.limit)
            up = up.clamp(-activation.limit, activation.limit)
            return (up + 1) * gate * torch.sigmoid(activation.alpha * gate)
    assert_never(activation.kind)


def check_routing(routing: Routing, num_experts: int) -> None:
    """Raise OperationInputError for a rule that cannot pick ``top_k`` of ``num_experts`` experts."""
    groups, kept = routing.num_groups, routing.kept_groups
    if groups < 1 or num_experts % groups:
        raise OperationInputError(f"{num_experts} experts cannot be split into {groups} equal groups")
    if not 1 <= kept <= groups:
        raise OperationInputError(f"kept_groups must be between 1 and the {groups} groups, got {kept}")
    available = num_experts // groups * kept
    if not 1 <= routing.top_k <= available:
        raise OperationInputError(
            f"top_k must be between 1 and the {available} experts to choose from, got {routing.top_k}"
        )
    if groups > 1 and routing.group_score is GroupScore.TOP_2_SUM and num_experts // groups < 2:
        raise OperationInputError("groups ranked by their two best experts need at least two experts each")


def check_experts(
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    first_expert: int,
    total_experts: int | None,
) -> None:
    """Raise OperationInputError when the shapes of a layer's experts do not fit together."""
    num_experts, double_intermediate, hidden = w13.shape
    expected: dict[str, tuple[int, ...]] = {"w2": (num_experts, hidden, double_intermediate // 2)}
    given: dict[str, Tensor] = {"w2": w2}
    if w13_bias is not None:
        expected["w13_bias"], given["w13_bias"] = (num_experts, double_intermediate), w13_bias
    if w2_bias is not None:
        expected["w2_bias"], given["w2_bias"] = (num_experts, hidden), w2_bias
    for name, shape in expected.items():
        if tuple(given[name].shape) != shape:
            raise OperationInputError(
                f"{name} must have shape {list(shape)} beside w13 {list(w13.shape)}, got {list(given[name].shape)}"
            )
    total = num_experts if total_experts is None else total_experts
    if not 0 <= first_expert <= total - num_experts:
        raise OperationInputError(
            f"experts {first_expert}..{first_expert + num_experts - 1} do not lie among the {total} of the layer"
        )


def _top_indices(scores: Tensor, top_k: int) -> Tensor:
    """int64[T, K], best first, ties to the lower index (``topk`` leaves the order of equal scores open)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]


def _keep_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """Scores of experts outside the best groups become -inf."""
    grouped = choice.view(*choice.shape[:-1], routing.num_groups, -1)
    match routing.group_score:
        case GroupScore.MAX:
            group_scores = grouped.amax(-1)
        case GroupScore.TOP_2_SUM:
            group_scores = grouped.topk(2, -1).values.sum(-1)
        case _:
            assert_never(routing.group_score)
    kept = _top_indices(group_scores, routing.kept_groups)
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).view_as(choice)
