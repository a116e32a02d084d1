"""Routing of tokens to experts through the kernels that know the rule, and in torch where none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.cuda.wheels import Wheels, load_module
from sglang_lite.adapters.dispatch import Package
from sglang_lite.adapters.moe import GroupScore, Routing, Scoring
from sglang_lite.adapters.moe_reference import check_routing, route

Gate = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(logits [T, E], bias [E] or None) -> (ids int32[T, K], weights float32[T, K])."""

_MAX_GROUPED_TOP_K = 8
_MAX_GROUPS = 32
_MAX_GROUP_EXPERTS = 32
_MAX_KEPT_EXPERTS = 128
_MAX_UNGROUPED_EXPERTS = 384
"""Limits of FlashInfer's grouped gate; the group size is also that of ``moe_fused_gate``."""


def make_gate(wheels: Wheels, selection: Selection, routing: Routing, logits: Tensor, has_bias: bool) -> Gate:
    """The function that applies a rule to logits of this type and width."""
    num_experts, dtype = logits.shape[1], logits.dtype
    check_routing(routing, num_experts)
    is_grouped = routing.kept_groups < routing.num_groups
    if routing.scoring is Scoring.TOP_K_SOFTMAX and not has_bias:
        if selection.provider("moe.top_k_softmax", dtype).package is Package.SGL_KERNEL:
            # Softmax over all, renormalised over the best K, is softmax over the best K.
            return _softmax_gate(wheels.sgl_kernel.topk_softmax, routing, renormalize=True)
    elif routing.scoring is Scoring.SOFTMAX and not is_grouped and not has_bias:
        if selection.provider("moe.softmax_top_k", dtype).package is Package.SGL_KERNEL:
            return _softmax_gate(wheels.sgl_kernel.topk_softmax, routing, renormalize=routing.renormalize)
    elif routing.scoring is Scoring.SIGMOID and not is_grouped:
        if selection.provider("moe.sigmoid_top_k", dtype).package is Package.SGL_KERNEL:
            return _sigmoid_gate(wheels.sgl_kernel.topk_sigmoid, routing)
    elif routing.scoring is Scoring.SIGMOID and has_bias:
        for provider in selection.providers("moe.grouped_top_k", dtype):
            if provider.package is Package.FLASHINFER and fits_flashinfer(routing, num_experts):
                kernel = load_module("flashinfer.fused_moe").fused_topk_deepseek
                return _flashinfer_grouped_gate(kernel, routing, selection.enable_pdl)
            if provider.package is Package.SGL_KERNEL and fits_fused_gate(routing, num_experts):
                return _fused_gate(wheels.sgl_kernel.moe_fused_gate, routing)
    return lambda given, bias: route(given, routing, bias)


def fits_flashinfer(routing: Routing, num_experts: int) -> bool:
    """Whether FlashInfer's grouped gate computes this rule: it ranks groups by two experts and always renormalizes."""
    group_size = num_experts // routing.num_groups
    return (
        routing.renormalize
        and routing.group_score is GroupScore.TOP_2_SUM
        and routing.top_k <= _MAX_GROUPED_TOP_K
        and (
            (routing.num_groups == 1 and num_experts <= _MAX_UNGROUPED_EXPERTS)
            or (
                routing.num_groups <= _MAX_GROUPS
                and group_size <= _MAX_GROUP_EXPERTS
                and group_size * routing.kept_groups <= _MAX_KEPT_EXPERTS
            )
        )
    )


def fits_fused_gate(routing: Routing, num_experts: int) -> bool:
    """Whether ``moe_fused_gate`` computes this rule: a power of two of experts in groups of at most 32."""
    return (
        routing.renormalize
        and routing.group_score is GroupScore.TOP_2_SUM
        and num_experts & (num_experts - 1) == 0
        and num_experts // routing.num_groups <= _MAX_GROUP_EXPERTS
    )


def _softmax_gate(kernel: Callable[..., None], routing: Routing, *, renormalize: bool) -> Gate:
    def gate(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ids, weights = _outputs(logits, routing.top_k)
        kernel(weights, ids, logits.contiguous(), renormalize=renormalize)
        return ids, _scaled(weights, routing)

    return gate


def _sigmoid_gate(kernel: Callable[..., None], routing: Routing) -> Gate:
    def gate(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ids, weights = _outputs(logits, routing.top_k)
        kernel(weights, ids, logits.contiguous(), renormalize=routing.renormalize, correction_bias=_float32(bias))
        return ids, _scaled(weights, routing)

    return gate


def _flashinfer_grouped_gate(kernel: Callable[..., None], routing: Routing, enable_pdl: bool) -> Gate:
    def gate(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        # Scores and bias have to be of one type; that of the bias is the one that must not be rounded.
        scores = logits.float().contiguous()
        ids, weights = _outputs(logits, routing.top_k)
        kernel(
            scores=scores,
            bias=_required(bias),
            n_group=routing.num_groups,
            topk_group=routing.kept_groups,
            topk=routing.top_k,
            routed_scaling_factor=routing.scaling,
            topk_values=weights,
            topk_indices=ids,
            launch_with_pdl=enable_pdl,
        )
        return ids, weights

    return gate


def _fused_gate(kernel: Callable[..., Any], routing: Routing) -> Gate:
    def gate(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, ids = kernel(
            logits.float().contiguous(),
            _required(bias),
            num_expert_group=routing.num_groups,
            topk_group=routing.kept_groups,
            topk=routing.top_k,
            num_fused_shared_experts=0,
            routed_scaling_factor=routing.scaling,
            apply_routed_scaling_factor_on_output=True,
        )
        return ids, weights

    return gate


def _outputs(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return (
        torch.empty(shape, dtype=torch.int32, device=logits.device),
        torch.empty(shape, dtype=torch.float32, device=logits.device),
    )


def _scaled(weights: Tensor, routing: Routing) -> Tensor:
    return weights if routing.scaling == 1.0 else weights.mul_(routing.scaling)


def _float32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()


def _required(bias: Tensor | None) -> Tensor:
    if bias is None:
        raise OperationInputError("the grouped gate was made for logits with a correction bias, and none was given")
    return bias.float().contiguous()
