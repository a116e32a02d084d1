"""Doubles of routing, alignment and the experts, written from the kernels' documentation and not from the adapters."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.kernel_doubles.capture import kernel
from tests.support.kernel_doubles.checks import KernelError, require


class ActivationType(Enum):
    """``flashinfer.tllm_enums.ActivationType``, as far as the adapters use it."""

    Geglu = 4
    Swiglu = 3


class HalfOrder:
    """Which half of the first matrix the double of the fused kernel takes for the gate; the record does not say."""

    gate_first = False


def _check_gate(topk_weights: Tensor, topk_ids: Tensor, gating_output: Tensor, bias: Tensor | None) -> None:
    tokens, experts = gating_output.shape
    require(gating_output.dim() == 2 and gating_output.is_contiguous(), "gate: logits must be a contiguous matrix")
    require(gating_output.dtype in (torch.float32, torch.float16, torch.bfloat16), f"gate: {gating_output.dtype}")
    for name, tensor, dtype in (("weights", topk_weights, torch.float32), ("ids", topk_ids, torch.int32)):
        require(
            tensor.dtype == dtype and tensor.shape[0] == tokens and tensor.shape[1] <= experts,
            f"gate: {name} must be {dtype} [{tokens}, K], got {tensor.dtype} {list(tensor.shape)}",
        )
    require(bias is None or (bias.dtype == torch.float32 and bias.shape == (experts,)), "gate: bias float32 [E]")


def _pick(choice: Tensor, scores: Tensor, topk_weights: Tensor, topk_ids: Tensor, renormalize: bool) -> None:
    remaining = choice.clone()
    for k in range(topk_ids.shape[1]):  # as the kernel does it: one maximum after another
        best = remaining.argmax(-1)
        topk_ids[:, k] = best
        topk_weights[:, k] = scores.gather(1, best[:, None])[:, 0]
        remaining.scatter_(1, best[:, None], float("-inf"))
    if renormalize:
        topk_weights.div_(topk_weights.sum(-1, keepdim=True))


@kernel
def topk_softmax(
    topk_weights: Tensor,
    topk_ids: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    moe_softcapping: float = 0.0,
    correction_bias: Tensor | None = None,
) -> None:
    _check_gate(topk_weights, topk_ids, gating_output, correction_bias)
    require(moe_softcapping == 0.0 and correction_bias is None, "topk_softmax: not doubled")
    scores = gating_output.float().softmax(-1)
    _pick(scores, scores, topk_weights, topk_ids, renormalize)


@kernel
def topk_sigmoid(
    topk_weights: Tensor,
    topk_ids: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    correction_bias: Tensor | None = None,
) -> None:
    _check_gate(topk_weights, topk_ids, gating_output, correction_bias)
    scores = gating_output.float().sigmoid()
    _pick(scores if correction_bias is None else scores + correction_bias, scores, topk_weights, topk_ids, renormalize)


def _grouped(scores: Tensor, bias: Tensor, groups: int, kept: int, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """One token at a time, from the formula."""
    ids = torch.empty(scores.shape[0], top_k, dtype=torch.int32)
    weights = torch.empty(scores.shape[0], top_k)
    size = scores.shape[1] // groups
    for token, logits in enumerate(scores.float()):
        probabilities = logits.sigmoid()
        choice = probabilities + bias.float()
        rank = [float(choice[g * size : g * size + size].topk(min(2, size)).values.sum()) for g in range(groups)]
        best_groups = sorted(range(groups), key=lambda g: -rank[g])[:kept]
        allowed = [e for g in best_groups for e in range(g * size, g * size + size)]
        best = sorted(allowed, key=lambda e: (-float(choice[e]), e))[:top_k]
        ids[token] = torch.tensor(best)
        weights[token] = probabilities[best] / probabilities[best].sum() * scaling
    return ids, weights


@kernel
def fused_topk_deepseek(
    scores: Tensor,
    bias: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: Tensor,
    topk_indices: Tensor,
    launch_with_pdl: bool = True,
) -> None:
    _check_gate(topk_values, topk_indices, scores, None)
    require(bias.dtype == scores.dtype and bias.shape == scores.shape[1:], "fused_topk_deepseek: bias like scores")
    size = scores.shape[1] // n_group
    require(topk <= 8 and n_group <= 32, "fused_topk_deepseek: at most 8 experts and 32 groups")
    require(
        (n_group == 1 and scores.shape[1] <= 384) or (size <= 32 and size * topk_group <= 128),
        "fused_topk_deepseek: too many experts in the groups",
    )
    ids, weights = _grouped(scores, bias, n_group, topk_group, topk, routed_scaling_factor)
    topk_indices.copy_(ids)
    topk_values.copy_(weights)


@kernel
def moe_fused_gate(
    input_tensor: Tensor,
    bias: Tensor,
    num_expert_group: int,
    topk_group: int,
    topk: int,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 0,
    apply_routed_scaling_factor_on_output: bool = False,
) -> list[Tensor]:
    experts = input_tensor.shape[1]
    require(bias.dtype == input_tensor.dtype, "moe_fused_gate: bias in the type of the logits")
    require(experts & (experts - 1) == 0, "moe_fused_gate: the number of experts must be a power of two")
    require(experts // num_expert_group <= 32, "moe_fused_gate: at most 32 experts a group")
    require(num_fused_shared_experts == 0, "moe_fused_gate: shared experts are not doubled")
    scaling = routed_scaling_factor if apply_routed_scaling_factor_on_output else 1.0
    ids, weights = _grouped(input_tensor, bias, num_expert_group, topk_group, topk, scaling)
    return [weights, ids]


@kernel
def moe_align_block_size(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: Tensor,
    experts_ids: Tensor,
    num_tokens_post_pad: Tensor,
    cumsum_buffer: Tensor,
    pad_sorted_token_ids: bool = False,
    ignore_invalid_expert: bool = False,
) -> None:
    for tensor in (topk_ids, sorted_token_ids, experts_ids, num_tokens_post_pad, cumsum_buffer):
        require(tensor.dtype == torch.int32, "moe_align_block_size: all tensors are int32")
    flat = topk_ids.flatten().tolist()
    buckets = num_experts
    require(cumsum_buffer.numel() >= buckets + 1, "moe_align_block_size: cumsum_buffer is too small")
    require(all(-1 <= e < buckets - 1 for e in flat), "moe_align_block_size: an id indexes past the counters")
    runs = [[index for index, expert in enumerate(flat) if expert + 1 == bucket] for bucket in range(buckets)]
    position = 0
    sorted_token_ids.fill_(-777)  # memory that nobody wrote
    if pad_sorted_token_ids:
        sorted_token_ids.fill_(len(flat))
    for bucket, run in enumerate(runs):
        for start in range(0, len(run), block_size):
            block = run[start : start + block_size]
            require(position + block_size <= sorted_token_ids.numel(), "moe_align_block_size: out of bounds")
            sorted_token_ids[position : position + len(block)] = torch.tensor(block, dtype=torch.int32)
            experts_ids[position // block_size] = bucket - 1
            position += block_size
    num_tokens_post_pad.fill_(position)


@kernel
def _run_experts(arguments: dict[str, object]) -> None:
    x, ids, scales = (arguments[name] for name in ("input", "token_selected_experts", "token_final_scales"))
    w13, w2, output = (arguments[name] for name in ("fc1_expert_weights", "fc2_expert_weights", "output"))
    assert isinstance(x, Tensor) and isinstance(ids, Tensor) and isinstance(scales, Tensor)
    assert isinstance(w13, Tensor) and isinstance(w2, Tensor) and isinstance(output, Tensor)
    b13, b2 = arguments.get("fc1_expert_biases"), arguments.get("fc2_expert_biases")
    first = int(str(arguments.get("ep_rank", 0))) * w13.shape[0]
    result = torch.zeros(x.shape, dtype=torch.float32)
    for token in range(x.shape[0]):
        for k in range(ids.shape[1]):
            expert = int(ids[token, k]) - first
            if not 0 <= expert < w13.shape[0]:
                continue
            both = w13[expert].float() @ x[token].float()
            both = both + b13[expert].float() if isinstance(b13, Tensor) else both
            one, two = both.chunk(2)
            gate, up = (one, two) if HalfOrder.gate_first else (two, one)
            hidden = _activate(gate, up, arguments, expert).to(x.dtype).float()
            down = w2[expert].float() @ hidden
            down = down + b2[expert].float() if isinstance(b2, Tensor) else down
            result[token] += scales[token, k] * down
    output.copy_(result)


def _activate(gate: Tensor, up: Tensor, arguments: dict[str, object], expert: int) -> Tensor:
    alpha, beta, limit = (arguments.get(f"swiglu_{name}") for name in ("alpha", "beta", "limit"))
    kind = arguments.get("activation_type", ActivationType.Swiglu)
    if kind is ActivationType.Geglu:
        return functional.gelu(gate, approximate="tanh") * up
    if not isinstance(alpha, Tensor):
        return functional.silu(gate) * up
    assert isinstance(beta, Tensor) and isinstance(limit, Tensor)
    gate, up = gate.clamp(max=float(limit[expert])), up.clamp(-float(limit[expert]), float(limit[expert]))
    return (up + beta[expert]) * gate * torch.sigmoid(alpha[expert] * gate)


def cutlass_fused_moe(**arguments: object) -> Tensor:
    """Takes what the adapters pass by name; anything else it does not compute is refused."""
    x, ids, scales = (arguments[name] for name in ("input", "token_selected_experts", "token_final_scales"))
    w13, w2 = arguments["fc1_expert_weights"], arguments["fc2_expert_weights"]
    output = arguments.get("output")
    for name, tensor in (("input", x), ("fc1", w13), ("fc2", w2), ("output", output)):
        require(isinstance(tensor, Tensor) and tensor.is_contiguous(), f"cutlass_fused_moe: {name} not contiguous")
    assert isinstance(x, Tensor) and isinstance(w13, Tensor) and isinstance(w2, Tensor) and isinstance(output, Tensor)
    assert isinstance(ids, Tensor) and isinstance(scales, Tensor)
    require(x.dtype in (torch.float16, torch.bfloat16) and w13.dtype == w2.dtype == x.dtype, "cutlass_fused_moe: types")
    require(ids.dtype == torch.int32 and scales.dtype == torch.float32, "cutlass_fused_moe: ids int32, scales float32")
    require(arguments["quant_scales"] == [] and arguments["output_dtype"] == x.dtype, "cutlass_fused_moe: scales")
    experts, double, hidden = w13.shape
    require(w2.shape == (experts, hidden, double // 2) and x.shape[1] == hidden, "cutlass_fused_moe: shapes")
    require(hidden % 8 == 0 and double % 16 == 0, "cutlass_fused_moe: rows of 16 bytes")
    require(x.shape[0] > 0, "cutlass_fused_moe: no tokens")
    for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit"):
        value = arguments.get(name)
        if value is not None:
            require(
                isinstance(value, Tensor) and value.dtype == torch.float32 and value.shape == (experts,),
                f"cutlass_fused_moe: {name} must be float32 [E]",
            )
    if arguments.get("backend") != "cutlass":
        raise KernelError("cutlass_fused_moe: name the backend")
    _run_experts(arguments)
    return output
