"""Quantized weights as checkpoints store them, and the protocol of the operations on them.

Weights are those of a linear layer with N outputs and K inputs; leading dimensions (experts) may stand before every
shape given here. ``adapters.dequantize`` turns each of them into plain [N, K].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sglang_lite.adapters.moe import SILU, ExpertActivation, PackedExperts


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """float8 values times scales: one for all, one an output, or one a block.

    Attributes:
        weight: float8_e4m3fn [N, K].
        scale: float32; [] or [1]: per tensor; [N] or [N, 1]: per output; with ``block``: [ceil(N/bn), ceil(K/bk)].
        block: (bn, bk) rows and columns that share a scale, or None.
        input_scale: float32 scalar that activations are divided by, or None to scale them as they come.
    """

    weight: Tensor
    scale: Tensor
    block: tuple[int, int] | None = None
    input_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """int8 [N, K] times ``scale`` float32 [], [1], [N] or [N, 1]."""

    weight: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class AwqWeight:
    """AWQ "gemm" layout: four bits, eight outputs to a word in the order 0 2 4 6 1 3 5 7 from the lowest bits on.

    Attributes:
        qweight: int32 [K, N/8].
        qzeros: int32 [K/g, N/8], packed alike.
        scales: [K/g, N]; value = (q - zero) * scale.
    """

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class GptqWeight:
    """GPTQ layout: ``bits`` bits, inputs packed in order from the lowest bits on.

    Attributes:
        qweight: int32 [K*bits/32, N].
        qzeros: int32 [K/g, N*bits/32], outputs packed in order.
        scales: [K/g, N]; value = (q - (zero + zero_offset)) * scale.
        group_index: int32 [K], the group of each input (activation order), or None: inputs in order, equal groups.
        bits: 2, 4 or 8.
        zero_offset: 1 in the first format version ("gptq"), 0 in the second ("gptq_v2").
    """

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    group_index: Tensor | None = None
    bits: int = 4
    zero_offset: int = 1


@dataclass(frozen=True, slots=True)
class PackedIntWeight:
    """compressed-tensors "pack-quantized": ``bits`` bits, inputs packed in order, offset by 2^(bits-1).

    Attributes:
        packed: int32 [N, ceil(K*bits/32)].
        scale: [N, K/g] or [N, 1]; value = (q - 2^(bits-1) - zero) * scale.
        in_features: K.
        zero_point: int32 [ceil(N*bits/32), K/g], outputs packed in order and offset alike, or None for 0.
        group_index: int32 [K], the group of each input, or None: inputs in order, equal groups.
        bits: 4 or 8.
    """

    packed: Tensor
    scale: Tensor
    in_features: int
    zero_point: Tensor | None = None
    group_index: Tensor | None = None
    bits: int = 4


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """OCP MXFP4: e2m1 values in blocks of 32 inputs that share a power of two.

    Attributes:
        blocks: uint8 [N, K/32, 16], two values a byte, the low nibble first.
        scales: uint8 [N, K/32], e8m0: value * 2^(scale - 127).
    """

    blocks: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class Nvfp4Weight:
    """NVFP4: e2m1 values in blocks of 16 inputs that share an e4m3 scale, and one scale for all.

    Attributes:
        packed: uint8 [N, K/2], two values a byte, the low nibble first.
        scale: float8_e4m3fn [N, K/16].
        global_scale: float32 scalar; value * scale * global_scale.
    """

    packed: Tensor
    scale: Tensor
    global_scale: Tensor


QuantizedWeight = Fp8Weight | Int8Weight | AwqWeight | GptqWeight | PackedIntWeight | Mxfp4Weight | Nvfp4Weight
"""Any weight that ``QuantizedOperations`` may be asked about."""


class QuantizedLinear(Protocol):
    """A quantized weight prepared for this device; the same interface as ``PackedLinear``."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features] in x.dtype, bias added when there is one."""


class QuantizedOperations(Protocol):
    """Quantizers and quantized products of one device.

    Quantizers take x [T, K] of float32, float16 or bfloat16, computed in float32, and return new tensors.
    fp8 is float8_e4m3fn with values within +-448; int8 values lie within +-127. A row or block of zeros has scale
    ``epsilon / maximum`` rather than 0.
    """

    def refusal(self, weight: QuantizedWeight) -> str | None:
        """None when ``pack_linear`` keeps this weight quantized, else why this device has no product for it."""

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        """[N, K], computed in float32."""

    def pack_linear(self, weight: QuantizedWeight, bias: Tensor | None) -> QuantizedLinear:
        """Take over a weight and keep it quantized; the caller drops its references.

        Raises:
            OperationInputError: this device has no product for it (``refusal`` says why), or shapes do not fit.
        """

    def experts_refusal(
        self, w13: QuantizedWeight, w2: QuantizedWeight, activation: ExpertActivation = SILU
    ) -> str | None:
        """None when this device has grouped products for such experts without biases; else why ``pack_experts`` would
        dequantize them in every step. ``w13`` and ``w2`` have a leading dimension of experts."""

    def pack_experts(
        self,
        w13: QuantizedWeight,
        w2: QuantizedWeight,
        *,
        activation: ExpertActivation = SILU,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        first_expert: int = 0,
        total_experts: int | None = None,
    ) -> PackedExperts:
        """As ``MoEOperations.pack_experts`` for weights with a leading dimension of experts."""

    def quantize_fp8_tensor(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(fp8 [T, K], float32 [1]): one scale, the given one or absolute maximum / 448."""

    def quantize_fp8_token(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(fp8 [T, K], float32 [T, 1]): a scale for each row."""

    def quantize_fp8_group(self, x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
        """(fp8 [T, K], float32 [T, K/group_size]): a scale for each run of ``group_size`` neighbours; it divides K."""

    def quantize_int8_token(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(int8 [T, K], float32 [T, 1]): a scale for each row, values rounded half to even."""

    def fp8_gemm(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        """fp8 [T, K] times fp8 [N, K]^T with scales a row: float32 [T, 1] and [N, 1] (or [1]). Returns [T, N]."""

    def fp8_block_gemm(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        dtype: torch.dtype,
        block: tuple[int, int] = (128, 128),
    ) -> Tensor:
        """fp8 [T, K] with float32 [T, K/bk] times fp8 [N, K]^T with float32 [ceil(N/bn), ceil(K/bk)] -> [T, N]."""

    def int8_gemm(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        """int8 [T, K] times int8 [N, K]^T, summed exactly in int32, times float32 [T, 1] and [N, 1]. [T, N]."""
