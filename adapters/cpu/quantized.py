"""Quantizers and quantized products in torch: the reference for every other device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cpu.moe import CpuMoE
from sglang_lite.adapters.dequantize import E2M1_VALUES, E8M0_BIAS, dequantize, dequantize_fp8
from sglang_lite.adapters.moe import SILU, ExpertActivation, PackedExperts
from sglang_lite.adapters.quantized import (
    Fp8Weight,
    Int8Weight,
    Mxfp4Weight,
    Nvfp4Weight,
    QuantizedLinear,
    QuantizedWeight,
)

FP8_MAXIMUM = 448.0
INT8_MAXIMUM = 127.0
E2M1_MAXIMUM = 6.0
QUANTIZER_EPSILON = 1e-10
"""Smallest absolute maximum of what shares a scale, so that zeros divide."""


class CpuQuantized:
    """``QuantizedOperations`` on the host.

    Models on the host compute with weights dequantized once (``refusal`` says so); ``pack_linear`` computes what a
    device computes that keeps them quantized, activations rounded to its type included, and is there to compare with.
    """

    def refusal(self, weight: QuantizedWeight) -> str | None:
        """The host has no quantized product that is faster than a plain one."""
        return "the host computes with plain weights; dequantize them"

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        """[N, K], computed in float32."""
        return dequantize(weight, dtype)

    def pack_linear(self, weight: QuantizedWeight, bias: Tensor | None) -> QuantizedLinear:
        """The product as a device with fp8 or int8 activations computes it; plain activations for other formats."""
        return ReferenceQuantizedLinear(self, weight, bias)

    def experts_refusal(
        self, w13: QuantizedWeight, w2: QuantizedWeight, activation: ExpertActivation = SILU
    ) -> str | None:
        """As ``refusal``."""
        return self.refusal(w13)

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
        """Experts with dequantized weights in float32."""
        return CpuMoE().pack_experts(
            dequantize(w13),
            dequantize(w2),
            activation=activation,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            first_expert=first_expert,
            total_experts=total_experts,
        )

    def quantize_fp8_tensor(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(fp8 [T, K], float32 [1]): one scale, the given one or absolute maximum / 448."""
        if scale is None:
            scale = _scale(x.float().abs().amax(), FP8_MAXIMUM)
        scale = scale.float().reshape(1)
        return _to_fp8(x.float() / scale), scale

    def quantize_fp8_token(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(fp8 [T, K], float32 [T, 1]): a scale for each row."""
        scale = _scale(x.float().abs().amax(-1, keepdim=True), FP8_MAXIMUM)
        return _to_fp8(x.float() / scale), scale

    def quantize_fp8_group(self, x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
        """(fp8 [T, K], float32 [T, K/group_size]): a scale for each run of neighbours."""
        if x.shape[-1] % group_size:
            raise OperationInputError(f"groups of {group_size} do not divide the {x.shape[-1]} elements of a row")
        grouped = x.float().reshape(*x.shape[:-1], -1, group_size)
        scale = _scale(grouped.abs().amax(-1), FP8_MAXIMUM)
        return _to_fp8(grouped / scale.unsqueeze(-1)).flatten(-2), scale

    def quantize_int8_token(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(int8 [T, K], float32 [T, 1]): a scale for each row, values rounded half to even."""
        scale = _scale(x.float().abs().amax(-1, keepdim=True), INT8_MAXIMUM)
        return (x.float() / scale).round_().clamp_(-INT8_MAXIMUM, INT8_MAXIMUM).to(torch.int8), scale

    def fp8_gemm(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        """fp8 [T, K] times fp8 [N, K]^T with scales a row; summed in float32."""
        check_gemm(x, x_scale, weight, weight_scale, torch.float8_e4m3fn)
        product = functional.linear(x.float(), weight.float())
        return _scaled(product, x_scale, weight_scale, dtype, bias)

    def fp8_block_gemm(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        dtype: torch.dtype,
        block: tuple[int, int] = (128, 128),
    ) -> Tensor:
        """fp8 [T, K] with a scale for each run of ``block[1]``, times fp8 [N, K]^T with a scale a block."""
        plain = dequantize_fp8(x, x_scale, (1, block[1]))
        return functional.linear(plain, dequantize_fp8(weight, weight_scale, block)).to(dtype)

    def int8_gemm(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        """int8 [T, K] times int8 [N, K]^T, summed exactly."""
        check_gemm(x, x_scale, weight, weight_scale, torch.int8)
        # Products are below 2^14 and float64 sums them exactly; torch has no int8 product for every shape here.
        product = functional.linear(x.double(), weight.double()).float()
        return _scaled(product, x_scale, weight_scale, dtype, bias)


class ReferenceQuantizedLinear:
    """What a device computes with a quantized weight: activations rounded to the type its product takes."""

    def __init__(self, operations: CpuQuantized, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self._operations = operations
        self._weight = weight
        self._bias = bias
        self._plain = dequantize(weight)

    @property
    def in_features(self) -> int:
        return self._plain.shape[1]

    @property
    def out_features(self) -> int:
        return self._plain.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features] in x.dtype."""
        rounded = self._round_activations(x.reshape(-1, x.shape[-1]))
        bias = None if self._bias is None else self._bias.float()
        return functional.linear(rounded, self._plain, bias).to(x.dtype).view(*x.shape[:-1], -1)

    def _round_activations(self, x: Tensor) -> Tensor:
        match self._weight:
            case Fp8Weight(block=(_, columns)):
                return dequantize_fp8(*self._operations.quantize_fp8_group(x, columns), (1, columns))
            case Fp8Weight(input_scale=Tensor() as scale):
                return dequantize_fp8(*self._operations.quantize_fp8_tensor(x, scale))
            case Fp8Weight():
                return dequantize_fp8(*self._operations.quantize_fp8_token(x))
            case Int8Weight():
                return dequantize_fp8(*self._operations.quantize_int8_token(x))
            case _:
                return x.float()


def quantize_mxfp4(x: Tensor) -> Mxfp4Weight:
    """Round [..., K] to MXFP4 blocks of 32 (OCP MX 1.0: the shared exponent is that of the largest value, less 2)."""
    if x.shape[-1] % 32:
        raise OperationInputError(f"MXFP4 blocks of 32 do not divide the {x.shape[-1]} elements of a row")
    grouped = x.float().reshape(*x.shape[:-1], -1, 32)
    # frexp gives a mantissa in [0.5, 1), so its exponent is one above that of the leading bit.
    exponent = grouped.abs().amax(-1).frexp().exponent - 1 - 2
    exponent = exponent.clamp_(-E8M0_BIAS, E8M0_BIAS)
    nibbles = _to_e2m1(torch.ldexp(grouped, -exponent.unsqueeze(-1)))
    return Mxfp4Weight(nibbles[..., 0::2] | nibbles[..., 1::2] << 4, (exponent + E8M0_BIAS).to(torch.uint8))


def quantize_nvfp4(x: Tensor) -> Nvfp4Weight:
    """Round [..., K] to NVFP4 blocks of 16. The common scale makes the largest block scale the largest e4m3 value."""
    if x.shape[-1] % 16:
        raise OperationInputError(f"NVFP4 blocks of 16 do not divide the {x.shape[-1]} elements of a row")
    grouped = x.float().reshape(*x.shape[:-1], -1, 16)
    largest = grouped.abs().amax(-1)
    global_scale = _scale(largest.amax(), FP8_MAXIMUM * E2M1_MAXIMUM)
    scale = _to_fp8(largest / E2M1_MAXIMUM / global_scale)
    # A block whose scale rounds to nothing is nothing.
    factor = (scale.float() * global_scale).unsqueeze(-1)
    nibbles = _to_e2m1(torch.where(factor > 0, grouped / factor, 0).flatten(-2))
    return Nvfp4Weight(nibbles[..., 0::2] | nibbles[..., 1::2] << 4, scale, global_scale)


def check_gemm(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> None:
    """Raise OperationInputError unless x [T, K] and weight [N, K] are of ``dtype`` with a scale a row (or one)."""
    if x.dtype != dtype or weight.dtype != dtype or x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise OperationInputError(
            f"expected {dtype} [T, K] and [N, K], got {x.dtype} {list(x.shape)} and {weight.dtype} {list(weight.shape)}"
        )
    for name, scale, rows in (("x_scale", x_scale, x.shape[0]), ("weight_scale", weight_scale, weight.shape[0])):
        if scale.dtype != torch.float32 or scale.numel() not in (1, rows):
            raise OperationInputError(
                f"{name} must be float32 with 1 or {rows} elements, got {scale.dtype} {list(scale.shape)}"
            )


def _scale(largest: Tensor, maximum: float) -> Tensor:
    return largest.clamp(min=QUANTIZER_EPSILON) / maximum


def _to_fp8(x: Tensor) -> Tensor:
    # The cast of an out-of-range value is NaN, so rounding up of the largest one must not leave the range.
    return x.clamp(-FP8_MAXIMUM, FP8_MAXIMUM).to(torch.float8_e4m3fn)


def _scaled(product: Tensor, x_scale: Tensor, weight_scale: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    scaled = product * x_scale.reshape(-1, 1) * weight_scale.reshape(1, -1)
    return (scaled if bias is None else scaled + bias.float()).to(dtype)


def _to_e2m1(x: Tensor) -> Tensor:
    """The nearest of the sixteen values, ties to the even mantissa: uint8 codes."""
    magnitudes = torch.tensor(E2M1_VALUES[:8])
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = x.abs()
    upper = torch.bucketize(size, middles, right=True)
    lower = torch.bucketize(size, middles)
    # At a midpoint the two differ by one; the even code has the even mantissa.
    code = torch.where(upper % 2 == 0, upper, lower)
    return (code + 8 * x.signbit()).to(torch.uint8)
