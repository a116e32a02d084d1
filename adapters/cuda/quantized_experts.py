"""Experts whose weights stay quantized: grouped float8 products, and a loop that dequantizes the experts hit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sglang_lite.adapters.cuda.quantized_linear import BLOCK
from sglang_lite.adapters.cuda.quantizers import CudaQuantizers
from sglang_lite.adapters.cuda.selection import is_capturing
from sglang_lite.adapters.dequantize import dequantize
from sglang_lite.adapters.moe import SILU, ExpertActivation
from sglang_lite.adapters.moe_reference import ExpertLayer, ExpertLoop
from sglang_lite.adapters.quantized import Fp8Weight, QuantizedWeight

Stored = TypeVar("Stored", bound=QuantizedWeight)

_WORKSPACE_BYTES = 90_000
_LAYOUT_ELEMENTS = 5
"""Size of the scratch of the grouped product, and of what it stores of a layout for each expert."""


class BlockExperts:
    """Float8 experts in blocks of 128 x 128, both products grouped. See ``adapters.moe.PackedExperts``.

    Args:
        w13: [E, 2I, H], the gate first; w2: [E, H, I].
        first_expert: of this rank. Pairs of experts held elsewhere are computed with expert 0 and weighted 0.
    """

    def __init__(
        self, kernels: Any, quantizers: CudaQuantizers, w13: Fp8Weight, w2: Fp8Weight, first_expert: int
    ) -> None:
        self._kernels = kernels
        self._quantizers = quantizers
        self._first_expert = first_expert
        self._num_experts, self._hidden, self._intermediate = w2.weight.shape
        self._w13 = _Grouped(w13, self._hidden, 2 * self._intermediate)
        self._w2 = _Grouped(w2, self._intermediate, self._hidden)
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=w13.weight.device)

    @staticmethod
    def takes(w13: Fp8Weight, w2: Fp8Weight, activation: ExpertActivation) -> bool:
        """Whether the kernels compute these experts."""
        _, hidden, intermediate = w2.weight.shape
        return (
            activation == SILU
            and w13.block == w2.block == (BLOCK, BLOCK)
            and hidden % BLOCK == 0
            and intermediate % BLOCK == 0
        )

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x [T, H], int32[T, K], float32[T, K] -> [T, H]."""
        if not x.shape[0]:
            return torch.empty_like(x)
        ids = topk_ids - self._first_expert
        held = (ids >= 0) & (ids < self._num_experts)
        ids, weights = ids.where(held, 0), topk_weights.where(held, 0)
        num_pairs = ids.numel()
        integers = ids.new_empty
        offsets = integers(self._num_experts + 1)
        sizes = integers(self._num_experts, 3), integers(self._num_experts, 3)
        rows_in, places_out = integers(num_pairs), integers(num_pairs)
        self._kernels.prepare_moe_input(
            ids, offsets, *sizes, rows_in, places_out, self._num_experts, self._intermediate, self._hidden
        )
        quantized, scale = self._quantizers.fp8_group(x, BLOCK)
        shuffle = self._kernels.shuffle_rows
        gate_up = self._product(
            self._w13,
            shuffle(quantized, rows_in, (num_pairs, self._hidden)),
            shuffle(scale, rows_in, (num_pairs, self._hidden // BLOCK)),
            sizes[0],
            offsets,
            x.dtype,
        )
        hidden = torch.empty(num_pairs, self._intermediate, dtype=x.dtype, device=x.device)
        self._kernels.silu_and_mul(gate_up, hidden)
        down = self._product(self._w2, *self._quantizers.fp8_group(hidden, BLOCK), sizes[1], offsets, x.dtype)
        output = torch.empty_like(x)
        self._kernels.apply_shuffle_mul_sum(down, output, places_out, weights.to(x.dtype))
        return output

    def _product(
        self, weight: _Grouped, rows: Tensor, scale: Tensor, sizes: Tensor, offsets: Tensor, dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty(rows.shape[0], weight.num_outputs, dtype=dtype, device=rows.device)
        self._kernels.fp8_blockwise_scaled_grouped_mm(
            out,
            *weight.pointers,
            rows,
            weight.values,
            scale,
            weight.scales,
            weight.input_stride,
            weight.input_stride,
            weight.output_stride,
            *weight.layouts,
            sizes,
            offsets[:-1],
            self._workspace,
        )
        return out


class _Grouped:
    """One matrix of all experts as the grouped product takes it, column-major, and its scratch for each expert."""

    def __init__(self, weight: Fp8Weight, num_inputs: int, num_outputs: int) -> None:
        num_experts, device = weight.weight.shape[0], weight.weight.device
        self.num_outputs = num_outputs
        self.values = weight.weight.transpose(1, 2)
        self.scales = weight.scale.float().contiguous().transpose(1, 2)
        self.input_stride = torch.full((num_experts,), num_inputs, dtype=torch.int64, device=device)
        self.output_stride = torch.full((num_experts,), num_outputs, dtype=torch.int64, device=device)
        self.pointers = [torch.empty(num_experts, dtype=torch.int64, device=device) for _ in range(5)]
        shape = (num_experts, _LAYOUT_ELEMENTS)
        self.layouts = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2)]


def dequantized_experts(
    w13: QuantizedWeight,
    w2: QuantizedWeight,
    activation: ExpertActivation,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    first_expert: int,
    dtype: torch.dtype,
) -> ExpertLoop:
    """The loop over the experts hit, each dequantized when it is its turn: memory for one plain expert at a time."""
    layer = ExpertLayer(
        num_experts=_first_tensor(w13).shape[0],
        hidden_size=dequantize(expert_of(w2, 0)).shape[0],
        w13=_plain(w13, dtype),
        w2=_plain(w2, dtype),
        activation=activation,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        first_expert=first_expert,
    )
    return ExpertLoop(layer, is_capturing)


def expert_of(weight: Stored, expert: int) -> Stored:
    """One expert's matrix out of a weight with a leading dimension of experts; a scalar is common to all of them."""
    parts = {entry.name: getattr(weight, entry.name) for entry in fields(weight)}
    own: dict[str, Any] = {
        name: part[expert] for name, part in parts.items() if isinstance(part, Tensor) and part.dim()
    }
    return replace(weight, **own)


def _plain(weight: QuantizedWeight, dtype: torch.dtype) -> Callable[[int], Tensor]:
    return lambda expert: dequantize(expert_of(weight, expert), dtype)


def _first_tensor(weight: QuantizedWeight) -> Tensor:
    tensor: Tensor = getattr(weight, fields(weight)[0].name)
    return tensor
