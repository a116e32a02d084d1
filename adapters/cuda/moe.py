"""Mixture-of-experts operations on CUDA, over the kernel wheels."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cuda.experts import FlashInferExperts, gate_half_first
from sglang_lite.adapters.cuda.routing import Gate, make_gate
from sglang_lite.adapters.cuda.selection import Selection, is_capturing
from sglang_lite.adapters.cuda.wheels import Wheels
from sglang_lite.adapters.dispatch import Package
from sglang_lite.adapters.moe import SILU, AlignedTokens, ExpertActivation, PackedExperts, Routing
from sglang_lite.adapters.moe_reference import check_experts, plain_experts

_ID_ALIGNMENT = 4
"""``sorted_token_ids`` is written in vectors of four."""


class CudaMoE:
    """See ``adapters.moe.MoEOperations``. Everything but ``pack_experts`` can be captured in a graph.

    Args:
        wheels: the modules.
        selection: what the dispatch table chooses for this device.
    """

    def __init__(self, wheels: Wheels, selection: Selection) -> None:
        self._wheels = wheels
        self._selection = selection
        self._gate_first: dict[torch.dtype, bool] = {}
        self._gates: dict[tuple[Routing, int, torch.dtype, bool], Gate] = {}

    def route(self, logits: Tensor, routing: Routing, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts: (topk_ids int32[T, K], topk_weights float32[T, K])."""
        key = (routing, logits.shape[1], logits.dtype, correction_bias is not None)
        gate = self._gates.get(key)
        if gate is None:
            gate = make_gate(self._wheels, self._selection, routing, logits, correction_bias is not None)
            self._gates[key] = gate
        return gate(logits, correction_bias)

    def align(self, topk_ids: Tensor, num_experts: int, block_size: int) -> AlignedTokens:
        """Sort pairs by expert, pad each run to whole blocks; expert -1 first."""
        # Ids of experts held elsewhere would index past the counters: all of them go to the bucket of -1.
        ids = topk_ids.where((topk_ids >= 0) & (topk_ids < num_experts), -1)
        num_pairs, num_buckets = ids.numel(), num_experts + 1
        capacity = num_pairs * block_size if num_pairs < num_buckets else num_pairs + num_buckets * (block_size - 1)
        capacity = -(-capacity // _ID_ALIGNMENT) * _ID_ALIGNMENT
        empty = ids.new_empty
        aligned = AlignedTokens(empty(capacity), empty(-(-capacity // block_size)), empty(1))
        self._wheels.sgl_kernel.moe_align_block_size(
            topk_ids=ids,
            num_experts=num_buckets,
            block_size=block_size,
            sorted_token_ids=aligned.sorted_pairs,
            experts_ids=aligned.block_experts,
            num_tokens_post_pad=aligned.num_padded,
            cumsum_buffer=empty(num_buckets + 1),
            pad_sorted_token_ids=True,
        )
        return aligned

    def grouped_gemm(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """Rows offsets[e]..offsets[e+1] of bfloat16 x [M, K] times weight[e]^T of [E, N, K] -> [M, N]."""
        if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or offsets.dtype != torch.int32:
            raise OperationInputError(
                f"grouped products take bfloat16 and int32 offsets, got {x.dtype}, {weight.dtype}, {offsets.dtype}"
            )
        product: Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets[1:])
        return product

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
        """FlashInfer's fused experts where the device has them, else the loop over experts."""
        check_experts(w13, w2, w13_bias, w2_bias, first_expert, total_experts)
        if self._selection.provider("moe.experts", w13.dtype).package is not Package.FLASHINFER:
            return plain_experts(w13, w2, activation, w13_bias, w2_bias, first_expert, is_capturing)
        return FlashInferExperts(
            w13,
            w2,
            activation,
            w13_bias,
            w2_bias,
            first_expert,
            w13.shape[0] if total_experts is None else total_experts,
            gate_first=self._gate_half_first(w13.device, w13.dtype),
            enable_pdl=self._selection.enable_pdl,
        )

    def _gate_half_first(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Asked from the kernel once, not for every layer."""
        if dtype not in self._gate_first:
            self._gate_first[dtype] = gate_half_first(device, dtype)
        return self._gate_first[dtype]

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
