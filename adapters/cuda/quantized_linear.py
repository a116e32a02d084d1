"""Linear layers whose weights stay quantized, one class a kernel. See ``adapters.quantized.QuantizedLinear``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_lite.adapters.cuda.quantizers import CudaQuantizers
from sglang_lite.adapters.quantized import AwqWeight, Fp8Weight, GptqWeight, Int8Weight

BLOCK = 128
"""Rows and columns of a weight that share a scale, and elements of a row that do."""

Product = Callable[[Tensor], Tensor]
"""[T, K] -> [T, N] in the type of the input."""


@dataclass(frozen=True, slots=True)
class KernelLinear:
    """A product of rows with the sizes around it.

    Attributes:
        in_features, out_features: K and N.
        product: with at least one row.
        bias: added afterwards; None where the product adds it, or without any.
    """

    in_features: int
    out_features: int
    product: Product
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        shape = (*x.shape[:-1], self.out_features)
        if not rows.shape[0]:
            return x.new_empty(shape)
        out = self.product(rows)
        return (out if self.bias is None else out.add_(self.bias)).view(shape)


def fp8_row_linear(kernels: Any, quantizers: CudaQuantizers, weight: Fp8Weight, bias: Tensor | None) -> KernelLinear:
    """Rows quantized one by one, or all by the scale of the checkpoint, times a weight with a scale an output."""
    values, scale = weight.weight, _per_output(weight.scale, weight.weight)

    def product(x: Tensor) -> Tensor:
        if weight.input_scale is None:
            quantized, row_scale = quantizers.fp8_token(x)
        else:
            quantized, one_scale = quantizers.fp8_tensor(x, weight.input_scale)
            row_scale = one_scale.expand(x.shape[0]).contiguous().unsqueeze(1)  # one scale is not taken everywhere
        out: Tensor = kernels.fp8_scaled_mm(quantized, values.t(), row_scale, scale, x.dtype, bias=bias)
        return out

    return _linear(values, product)


def int8_row_linear(kernels: Any, quantizers: CudaQuantizers, weight: Int8Weight, bias: Tensor | None) -> KernelLinear:
    """Rows quantized one by one times an int8 weight."""
    values, scale = weight.weight, _per_output(weight.scale, weight.weight)

    def product(x: Tensor) -> Tensor:
        quantized, row_scale = quantizers.int8_token(x)
        out: Tensor = kernels.int8_scaled_mm(quantized, values.t(), row_scale, scale, x.dtype, bias=bias)
        return out

    return _linear(values, product)


def fp8_block_linear_hopper(gemm: Any, weight: Fp8Weight, bias: Tensor | None) -> KernelLinear:
    """FlashInfer's product for SM 90, which quantizes the bfloat16 rows itself."""
    values, scale = weight.weight, weight.scale.float().contiguous()

    def product(x: Tensor) -> Tensor:
        out: Tensor = gemm.fp8_blockscale_gemm_sm90(
            input=x.contiguous(),
            weight=values,
            input_scale=None,
            weight_scale=scale,
            out=torch.empty(x.shape[0], values.shape[0], dtype=x.dtype, device=x.device),
            out_dtype=x.dtype,
        )
        return out

    return _linear(values, product, bias)


def fp8_block_linear_groupwise(
    gemm: Any, quantizers: CudaQuantizers, weight: Fp8Weight, bias: Tensor | None
) -> KernelLinear:
    """FlashInfer's product for SM 100 and newer."""
    values, scale = weight.weight, weight.scale.float().contiguous()

    def product(x: Tensor) -> Tensor:
        quantized, row_scale = quantizers.fp8_group(x, BLOCK)
        out: Tensor = gemm.gemm_fp8_nt_groupwise(
            a=quantized,
            b=values,
            a_scale=row_scale,
            b_scale=scale,
            scale_major_mode="K",
            mma_sm=1,
            scale_granularity_mnk=(1, BLOCK, BLOCK),
            out=torch.empty(x.shape[0], values.shape[0], dtype=x.dtype, device=x.device),
            out_dtype=x.dtype,
            backend="cutlass",
        )
        return out

    return _linear(values, product, bias)


def fp8_block_linear_sgl(
    kernels: Any, quantizers: CudaQuantizers, weight: Fp8Weight, bias: Tensor | None
) -> KernelLinear:
    """The product of the older kernel line: weight, its scales and those of the rows column-major."""
    values, scale = weight.weight, weight.scale.float().contiguous()

    def product(x: Tensor) -> Tensor:
        quantized, row_scale = quantizers.fp8_group(x, BLOCK, column_major=True)
        out: Tensor = kernels.fp8_blockwise_scaled_mm(quantized, values.t(), row_scale, scale.t(), x.dtype)
        return out

    return _linear(values, product, bias)


def awq_linear(kernels: Any, weight: AwqWeight, bias: Tensor | None, dtype: torch.dtype) -> KernelLinear:
    """The weight is unpacked by a kernel for every product and never kept."""
    scales = weight.scales.to(dtype).contiguous()
    in_features, out_features = weight.qweight.shape[0], scales.shape[1]

    def product(x: Tensor) -> Tensor:
        unpacked: Tensor = kernels.awq_dequantize(weight.qweight, scales, weight.qzeros)
        return torch.mm(x, unpacked)

    return KernelLinear(in_features, out_features, product, bias)


def gptq_linear(kernels: Any, weight: GptqWeight, bias: Tensor | None) -> KernelLinear:
    """The packed words are put in the kernel's order once; the caller's tensor is left alone."""
    device, packed = weight.qweight.device, weight.qweight.clone()
    if weight.group_index is None:
        order = torch.empty(0, dtype=torch.int32, device=device)
    else:
        order = weight.group_index.argsort(stable=True).to(torch.int32)
    kernels.gptq_shuffle(packed, order, weight.bits)
    scales = weight.scales.half().contiguous()

    def product(x: Tensor) -> Tensor:
        out: Tensor = kernels.gptq_gemm(x.contiguous(), packed, weight.qzeros, scales, order, True, weight.bits)
        return out

    return KernelLinear(weight.qweight.shape[0] * 32 // weight.bits, scales.shape[1], product, bias)


def _linear(weight: Tensor, product: Product, bias: Tensor | None = None) -> KernelLinear:
    return KernelLinear(weight.shape[1], weight.shape[0], product, bias)


def _per_output(scale: Tensor, weight: Tensor) -> Tensor:
    return scale.float().reshape(-1).expand(weight.shape[0]).contiguous()
