"""What every device shares of mixture-of-experts operations: checks, and routing and activations in plain torch."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.moe import ActivationKind, ExpertActivation, GroupScore, Routing, Scoring


def route(logits: Tensor, routing: Routing, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``MoEOperations.route`` in torch, on whatever device ``logits`` are on."""
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
