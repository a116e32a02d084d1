"""What every device shares of mixture-of-experts operations: checks, and routing and activations in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.moe import ActivationKind, ExpertActivation, GroupScore, Routing, Scoring

TopIndices = Callable[[Tensor, int], Tensor]
"""([T, E], K) -> int64[T, K]: the K largest of each row, largest first, ties to the lower index."""


def top_indices(scores: Tensor, top_k: int) -> Tensor:
    """By sorting, without a look at any value: it can be captured in a graph. See ``TopIndices``."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]


def top_indices_on_host(scores: Tensor, top_k: int) -> Tensor:
    """By selection, which leaves the order of equal scores open; only rows that have any are sorted."""
    best = scores.topk(min(top_k + 1, scores.shape[-1]), dim=-1)
    indices = best.indices[..., :top_k]
    tied = (best.values[..., 1:] == best.values[..., :-1]).any(-1)
    if tied.any():
        indices[tied] = top_indices(scores[tied], top_k)
    return indices


def route(
    logits: Tensor, routing: Routing, correction_bias: Tensor | None = None, best: TopIndices = top_indices
) -> tuple[Tensor, Tensor]:
    """``MoEOperations.route`` in torch, on whatever device ``logits`` are on.

    ``best`` finds the largest; the default runs anywhere.
    """
    check_routing(routing, logits.shape[-1])
    logits = logits.float()
    if routing.scoring is Scoring.TOP_K_SOFTMAX:
        ids = best(logits if correction_bias is None else logits + correction_bias, routing.top_k)
        weights = logits.gather(-1, ids).softmax(-1)
        return ids.to(torch.int32), weights.mul_(routing.scaling) if routing.scaling != 1.0 else weights
    scores = logits.softmax(-1) if routing.scoring is Scoring.SOFTMAX else logits.sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias.float()
    if routing.num_groups > 1:
        choice = _keep_best_groups(choice, routing, best)
    ids = best(choice, routing.top_k)
    weights = scores.gather(-1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    if routing.scaling != 1.0:
        weights = weights * routing.scaling
    return ids.to(torch.int32), weights


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One layer's experts as matrices by number, however they are stored.

    Attributes:
        num_experts: experts held here.
        hidden_size: H.
        w13, w2: number -> [2I, H] and [H, I], in the type to compute with.
        activation: between the two.
        w13_bias, w2_bias: [E, 2I], [E, H].
        first_expert: the number, over all ranks, of the first expert held here.
    """

    num_experts: int
    hidden_size: int
    w13: Callable[[int], Tensor]
    w2: Callable[[int], Tensor]
    activation: ExpertActivation
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    first_expert: int = 0


class ExpertLoop:
    """Two products for each expert that some token chose. See ``PackedExperts``.

    It asks how many tokens each expert has, which waits for the device. While a graph is captured nothing can be asked:
    then every expert runs on every token, weighted 0 where it was not chosen.

    Args:
        layer: the experts.
        is_capturing: whether a graph is being captured on this device.
    """

    def __init__(self, layer: ExpertLayer, is_capturing: Callable[[], bool] = bool) -> None:
        self._layer = layer
        self._is_capturing = is_capturing

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x [T, H], int32[T, K], float32[T, K] -> [T, H]."""
        if self._is_capturing():
            return self._run_all(x, topk_ids, topk_weights)
        return self._run_chosen(x, topk_ids, topk_weights)

    def _run_chosen(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        layer = self._layer
        num_tokens, top_k = topk_ids.shape
        local = topk_ids.reshape(-1).long() - layer.first_expert
        # Pairs of experts held elsewhere sort behind all others and are never computed.
        local = torch.where((local >= 0) & (local < layer.num_experts), local, layer.num_experts)
        order = local.argsort(stable=True)
        counts = torch.bincount(local, minlength=layer.num_experts + 1)[: layer.num_experts].tolist()
        num_held = sum(counts)
        rows = x.index_select(0, order[:num_held] // top_k)
        outputs = x.new_empty(num_held, layer.hidden_size)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                outputs[start : start + count] = self._run(expert, rows[start : start + count])
                start += count
        pairs = x.new_zeros(num_tokens * top_k, layer.hidden_size).index_copy_(0, order[:num_held], outputs)
        weighted = pairs.view(num_tokens, top_k, layer.hidden_size).float().mul_(topk_weights.unsqueeze(-1))
        return weighted.sum(1).to(x.dtype)

    def _run_all(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        layer = self._layer
        total = torch.zeros(x.shape[0], layer.hidden_size, dtype=torch.float32, device=x.device)
        for expert in range(layer.num_experts):
            share = topk_weights.masked_fill(topk_ids != layer.first_expert + expert, 0).sum(-1, keepdim=True)
            total.addcmul_(self._run(expert, x).float(), share)
        return total.to(x.dtype)

    def _run(self, expert: int, rows: Tensor) -> Tensor:
        layer = self._layer
        w13_bias = None if layer.w13_bias is None else layer.w13_bias[expert]
        w2_bias = None if layer.w2_bias is None else layer.w2_bias[expert]
        hidden = gated_activation(functional.linear(rows, layer.w13(expert), w13_bias), layer.activation)
        return functional.linear(hidden, layer.w2(expert), w2_bias)


def plain_experts(
    w13: Tensor,
    w2: Tensor,
    activation: ExpertActivation,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    first_expert: int,
    is_capturing: Callable[[], bool] = bool,
) -> ExpertLoop:
    """The loop over weights w13 [E, 2I, H], w2 [E, H, I] kept as they are."""
    layer = ExpertLayer(
        w13.shape[0], w2.shape[1], w13.__getitem__, w2.__getitem__, activation, w13_bias, w2_bias, first_expert
    )
    return ExpertLoop(layer, is_capturing)


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


def _keep_best_groups(choice: Tensor, routing: Routing, best: TopIndices) -> Tensor:
    """Scores of experts outside the best groups become -inf."""
    grouped = choice.view(*choice.shape[:-1], routing.num_groups, -1)
    match routing.group_score:
        case GroupScore.MAX:
            group_scores = grouped.amax(-1)
        case GroupScore.TOP_2_SUM:
            group_scores = grouped.topk(2, -1).values.sum(-1)
        case _:
            assert_never(routing.group_score)
    kept = best(group_scores, routing.kept_groups)
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).view_as(choice)
