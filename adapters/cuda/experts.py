"""The experts of a layer in FlashInfer's fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never

import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cuda.wheels import load_module
from sglang_lite.adapters.moe import ActivationKind, ExpertActivation
from sglang_lite.types import StartupError

VECTOR_ELEMENTS = 8
"""Rows of both products are loaded in vectors of 16 bytes of half-precision elements."""

_PROBE_WIDTH = 128
_TUNED_TOKENS = 8192


class FlashInferExperts:
    """``cutlass_fused_moe`` over one layer's weights. See ``adapters.moe.PackedExperts``.

    Args:
        w13: [E, 2I, H]; interleaved or swapped halves are put in the kernel's order, which copies it.
        w2: [E, H, I].
        total_experts: on all ranks; the ranks hold equal parts, in order.
        gate_first: which half of the first matrix the kernel takes for the gate (``gate_half_first``).

    Raises:
        OperationInputError: shapes or a split of the experts that the kernel does not take.
    """

    def __init__(
        self,
        w13: Tensor,
        w2: Tensor,
        activation: ExpertActivation,
        w13_bias: Tensor | None,
        w2_bias: Tensor | None,
        first_expert: int,
        total_experts: int,
        *,
        gate_first: bool,
        enable_pdl: bool,
    ) -> None:
        num_experts, hidden, intermediate = w2.shape
        if hidden % VECTOR_ELEMENTS or intermediate % VECTOR_ELEMENTS:
            raise OperationInputError(
                f"fused experts need hidden and intermediate sizes divisible by {VECTOR_ELEMENTS}, got {hidden} and "
                f"{intermediate}"
            )
        if total_experts % num_experts or first_expert % num_experts:
            raise OperationInputError(
                f"fused experts are split over ranks in equal parts; {num_experts} experts from {first_expert} on are "
                f"no such part of {total_experts}"
            )
        self._kernel = _kernel()
        self._w13 = _in_kernel_order(w13, activation.interleaved, gate_first)
        self._w2 = w2.contiguous()
        self._options: dict[str, object] = {
            "fc1_expert_biases": None
            if w13_bias is None
            else _in_kernel_order(w13_bias, activation.interleaved, gate_first),
            "fc2_expert_biases": None if w2_bias is None else w2_bias.contiguous(),
            "ep_size": total_experts // num_experts,
            "ep_rank": first_expert // num_experts,
            "tune_max_num_tokens": _TUNED_TOKENS,
            "enable_pdl": enable_pdl,
            "backend": "cutlass",
            **_activation_options(activation, num_experts, w13.device),
        }

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x [T, H], int32[T, K], float32[T, K] -> [T, H]."""
        output = torch.empty_like(x)
        if x.shape[0]:
            self._kernel(
                input=x.contiguous(),
                token_selected_experts=topk_ids,
                token_final_scales=topk_weights,
                fc1_expert_weights=self._w13,
                fc2_expert_weights=self._w2,
                output_dtype=x.dtype,
                quant_scales=[],
                output=output,
                **self._options,
            )
        return output


def _kernel() -> Callable[..., Any]:
    kernel: Callable[..., Any] = load_module("flashinfer.fused_moe").cutlass_fused_moe
    return kernel


def gate_half_first(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel takes the first half of the first matrix for the gate, asked from the kernel itself.

    One token of ones goes through one expert whose first half gives 1 and whose second half gives 2 in every element,
    and whose second matrix is the identity: silu(1) * 2 or silu(2) * 1 comes out.

    Raises:
        StartupError: something else comes out.
    """
    width = _PROBE_WIDTH
    halves = torch.tensor([1.0 / width, 2.0 / width], device=device, dtype=dtype)
    w13 = halves.repeat_interleave(width).view(1, 2 * width, 1).expand(1, 2 * width, width).contiguous()
    x = torch.ones(1, width, device=device, dtype=dtype)
    output = torch.empty_like(x)
    _kernel()(
        input=x,
        token_selected_experts=torch.zeros(1, 1, dtype=torch.int32, device=device),
        token_final_scales=torch.ones(1, 1, dtype=torch.float32, device=device),
        fc1_expert_weights=w13,
        fc2_expert_weights=torch.eye(width, device=device, dtype=dtype).unsqueeze(0),
        output_dtype=dtype,
        quant_scales=[],
        output=output,
        backend="cutlass",
    )
    found = output.float()
    for gate, up, answer in ((1.0, 2.0, True), (2.0, 1.0, False)):
        expected = torch.nn.functional.silu(torch.tensor(gate)) * up
        if bool(((found - expected.to(device)).abs() < 0.05).all()):
            return answer
    raise StartupError(
        "flashinfer.fused_moe.cutlass_fused_moe gives wrong results on this device: an expert with a known answer "
        f"gave {found.flatten()[0].item():.4f}, not 1.4621 or 1.7616. Run `sglang-lite check-env --verify`"
    )


def _in_kernel_order(matrix: Tensor, interleaved: bool, gate_first: bool) -> Tensor:
    """[E, 2I, ...] with the gate's rows in the half where the kernel looks for them."""
    if interleaved:
        gate, up = matrix[:, 0::2], matrix[:, 1::2]
    else:
        if gate_first:
            return matrix.contiguous()
        gate, up = matrix.chunk(2, 1)
    return torch.cat([gate, up] if gate_first else [up, gate], 1)


def _activation_options(activation: ExpertActivation, num_experts: int, device: torch.device) -> dict[str, object]:
    kinds = load_module("flashinfer.tllm_enums").ActivationType
    match activation.kind:
        case ActivationKind.SILU:
            return {"activation_type": kinds.Swiglu}
        case ActivationKind.GELU_TANH:
            return {"activation_type": kinds.Geglu}
        case ActivationKind.CLAMPED_SWIGLU:
            values = {"swiglu_alpha": activation.alpha, "swiglu_beta": 1.0, "swiglu_limit": activation.limit}
            constants = {
                name: torch.full((num_experts,), value, dtype=torch.float32, device=device)
                for name, value in values.items()
            }
            return {"activation_type": kinds.Swiglu, **constants}
    assert_never(activation.kind)
