"""Quantized products on CUDA: which kernel keeps which stored weight, and why none does."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cuda.quantized_experts import BlockExperts, dequantized_experts
from sglang_lite.adapters.cuda.quantized_linear import (
    BLOCK,
    awq_linear,
    fp8_block_linear_groupwise,
    fp8_block_linear_hopper,
    fp8_block_linear_sgl,
    fp8_row_linear,
    gptq_linear,
    int8_row_linear,
)
from sglang_lite.adapters.cuda.quantizers import CudaQuantizers
from sglang_lite.adapters.cuda.selection import Selection, dtype_name
from sglang_lite.adapters.cuda.wheels import Wheels, load_module
from sglang_lite.adapters.dequantize import dequantize
from sglang_lite.adapters.dispatch import TABLE, Package, Provider, why_not
from sglang_lite.adapters.moe import SILU, ExpertActivation, PackedExperts
from sglang_lite.adapters.quantized import (
    AwqWeight,
    Fp8Weight,
    GptqWeight,
    Int8Weight,
    Mxfp4Weight,
    Nvfp4Weight,
    PackedIntWeight,
    QuantizedLinear,
    QuantizedWeight,
)

_ROW_BYTES = 16
_OUTPUT_MULTIPLE = 8
_HOPPER_OUTPUT_MULTIPLE = 64
_GPTQ_BITS = (2, 4, 8)


class CudaQuantized:
    """See ``adapters.quantized.QuantizedOperations``.

    Args:
        wheels: the modules.
        selection: what the dispatch table chooses for this device.
        dtype: of the activations; the products return it.
    """

    def __init__(self, wheels: Wheels, selection: Selection, dtype: torch.dtype = torch.bfloat16) -> None:
        self._wheels = wheels
        self._selection = selection
        self._dtype = dtype
        self._quantizers = CudaQuantizers(wheels, selection, dtype)

    def refusal(self, weight: QuantizedWeight) -> str | None:
        """None when a kernel computes with this weight as it is stored."""
        found = self._provider(weight)
        return found if isinstance(found, str) else None

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        """[N, K], computed in float32."""
        return dequantize(weight, dtype)

    def pack_linear(self, weight: QuantizedWeight, bias: Tensor | None) -> QuantizedLinear:
        """Keep the weight quantized."""
        provider = self._provider(weight)
        if isinstance(provider, str):
            raise OperationInputError(f"no quantized product for {type(weight).__name__}: {provider}")
        kernels = self._wheels.sgl_kernel
        match weight:
            case Fp8Weight(block=None):
                return fp8_row_linear(kernels, self._quantizers, weight, bias)
            case Fp8Weight():
                if provider.package is Package.SGL_KERNEL:
                    return fp8_block_linear_sgl(kernels, self._quantizers, weight, bias)
                gemm = load_module("flashinfer.gemm")
                if provider.name == "groupwise":
                    return fp8_block_linear_groupwise(gemm, self._quantizers, weight, bias)
                return fp8_block_linear_hopper(gemm, weight, bias)
            case Int8Weight():
                return int8_row_linear(kernels, self._quantizers, weight, bias)
            case AwqWeight():
                return awq_linear(kernels, weight, bias, self._dtype)
            case GptqWeight():
                return gptq_linear(kernels, weight, bias)
        raise OperationInputError(f"no quantized product for {type(weight).__name__}")

    def experts_refusal(
        self, w13: QuantizedWeight, w2: QuantizedWeight, activation: ExpertActivation = SILU
    ) -> str | None:
        """None for float8 in blocks of 128 x 128, where the wheel has the grouped product."""
        if not isinstance(w13, Fp8Weight) or not isinstance(w2, Fp8Weight):
            return "only float8 experts have grouped products"
        if self._selection.provider("moe.experts_fp8_blocks", self._dtype).package is not Package.SGL_KERNEL:
            return "no kernel for this device has grouped products of float8 blocks"
        if not BlockExperts.takes(w13, w2, activation):
            return f"grouped products need blocks of {BLOCK} x {BLOCK} that fill the experts, and SwiGLU"
        return None

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
        """Grouped float8 products for blocks of 128 x 128; every other format dequantizes one expert after the
        other in every call: slow, in the memory of the stored weights."""
        has_biases = w13_bias is not None or w2_bias is not None
        if not has_biases and self.experts_refusal(w13, w2, activation) is None:
            assert isinstance(w13, Fp8Weight) and isinstance(w2, Fp8Weight)  # or it is refused
            return BlockExperts(self._wheels.sgl_kernel, self._quantizers, w13, w2, first_expert)
        return dequantized_experts(w13, w2, activation, w13_bias, w2_bias, first_expert, self._dtype)

    def quantize_fp8_tensor(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(fp8 [T, K], float32 [1])."""
        return self._quantizers.fp8_tensor(x, scale)

    def quantize_fp8_token(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(fp8 [T, K], float32 [T, 1])."""
        return self._quantizers.fp8_token(x)

    def quantize_fp8_group(self, x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
        """(fp8 [T, K], float32 [T, K/group_size])."""
        return self._quantizers.fp8_group(x, group_size)

    def quantize_int8_token(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(int8 [T, K], float32 [T, 1])."""
        return self._quantizers.int8_token(x)

    def fp8_gemm(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        """fp8 [T, K] times fp8 [N, K]^T with scales a row."""
        self._require(Fp8Weight(weight, weight_scale))
        out: Tensor = self._wheels.sgl_kernel.fp8_scaled_mm(
            x, weight.t(), _rows(x_scale, x), _rows(weight_scale, weight), dtype, bias=bias
        )
        return out

    def fp8_block_gemm(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        dtype: torch.dtype,
        block: tuple[int, int] = (128, 128),
    ) -> Tensor:
        """fp8 [T, K] in groups of 128 times fp8 [N, K]^T in blocks of 128 x 128."""
        provider = self._require(Fp8Weight(weight, weight_scale, block))
        if provider.package is Package.SGL_KERNEL:
            column_major = x_scale.t().contiguous().t()
            out: Tensor = self._wheels.sgl_kernel.fp8_blockwise_scaled_mm(
                x, weight.t(), column_major, weight_scale.contiguous().t(), dtype
            )
            return out
        gemm = load_module("flashinfer.gemm")
        out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
        if provider.name == "groupwise":
            gemm.gemm_fp8_nt_groupwise(
                a=x,
                b=weight,
                a_scale=x_scale,
                b_scale=weight_scale,
                scale_major_mode="K",
                mma_sm=1,
                scale_granularity_mnk=(1, BLOCK, BLOCK),
                out=out,
                out_dtype=dtype,
                backend="cutlass",
            )
        else:
            gemm.fp8_blockscale_gemm_sm90(
                input=x, weight=weight, input_scale=x_scale, weight_scale=weight_scale, out=out, out_dtype=dtype
            )
        return out

    def int8_gemm(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        """int8 [T, K] times int8 [N, K]^T with scales a row."""
        self._require(Int8Weight(weight, weight_scale))
        out: Tensor = self._wheels.sgl_kernel.int8_scaled_mm(
            x, weight.t(), _rows(x_scale, x), _rows(weight_scale, weight), dtype, bias=bias
        )
        return out

    def _require(self, weight: QuantizedWeight) -> Provider:
        found = self._provider(weight)
        if isinstance(found, str):
            raise OperationInputError(f"no quantized product for {type(weight).__name__}: {found}")
        return found

    def _provider(self, weight: QuantizedWeight) -> Provider | str:
        """The kernel for a weight of two dimensions, or why there is none."""
        match weight:
            case Fp8Weight(block=None):
                return self._kernel("linear.fp8_per_channel") if (why := _rows_fit(weight.weight)) is None else why
            case Fp8Weight():
                return self._block_kernel(weight)
            case Int8Weight():
                return self._kernel("linear.int8") if (why := _rows_fit(weight.weight)) is None else why
            case AwqWeight():
                return self._kernel("linear.awq")
            case GptqWeight():
                return self._kernel("linear.gptq") if (why := _gptq_fits(weight)) is None else why
            case PackedIntWeight():
                return "no kernel of the wheels reads this order of 4-bit values; dequantize the weight"
            case Mxfp4Weight():
                return (
                    "the wheels multiply MXFP4 weights with float8 rows of their own layout only; dequantize the weight"
                )
            case Nvfp4Weight():
                return "products of NVFP4 weights quantize the rows to 4 bits as well; dequantize the weight"
        assert_never(weight)

    def _block_kernel(self, weight: Fp8Weight) -> Provider | str:
        num_outputs, num_inputs = weight.weight.shape
        if weight.block != (BLOCK, BLOCK):
            return f"the kernels take blocks of {BLOCK} x {BLOCK}, not {weight.block}"
        found = self._kernel("linear.fp8_blocks")
        if isinstance(found, str):
            return found
        multiple = _HOPPER_OUTPUT_MULTIPLE if found.package is Package.FLASHINFER and not found.name else BLOCK
        if num_inputs % BLOCK or num_outputs % multiple:
            return (
                f"the kernel takes inputs in multiples of {BLOCK} and outputs of {multiple}, not {num_inputs} and "
                f"{num_outputs}"
            )
        return found

    def _kernel(self, operation: str) -> Provider | str:
        """The first provider that is a kernel, or why each of them does not serve."""
        reasons = []
        for provider in TABLE[operation].providers:
            if provider.package is Package.TORCH:
                continue
            problem = why_not(provider, self._selection.target, dtype_name(self._dtype))
            if problem is None:
                return provider
            reasons.append(f"{provider.label}: {problem}")
        return "; ".join([*reasons, "dequantize the weight"])


def _rows(scale: Tensor, matrix: Tensor) -> Tensor:
    """float32 with one element a row, which every architecture takes."""
    return scale.float().reshape(-1).expand(matrix.shape[0]).contiguous()


def _rows_fit(weight: Tensor) -> str | None:
    num_outputs, num_inputs = weight.shape
    if num_inputs * weight.element_size() % _ROW_BYTES or num_outputs % _OUTPUT_MULTIPLE:
        return (
            f"the kernel takes inputs in multiples of {_ROW_BYTES // weight.element_size()} and outputs of "
            f"{_OUTPUT_MULTIPLE}, not {num_inputs} and {num_outputs}"
        )
    return None


def _gptq_fits(weight: GptqWeight) -> str | None:
    if weight.bits not in _GPTQ_BITS:
        return f"the kernel takes {', '.join(map(str, _GPTQ_BITS))} bits, not {weight.bits}"
    if weight.zero_offset != 1:
        return "the kernel adds 1 to every zero, as the first format version means it, and this is the second"
    if weight.group_index is not None:
        sizes = torch.bincount(weight.group_index.long(), minlength=weight.scales.shape[0])
        if bool((sizes != sizes[0]).any()):
            return "the kernel takes groups of equal size"
    return None
