"""Quantizers of activations on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.cuda.wheels import Wheels
from sglang_lite.adapters.dispatch import Package

FP8 = torch.float8_e4m3fn
FP8_MAXIMUM = 448.0
INT8_MAXIMUM = 127.0
GROUP_EPSILON = 1e-10
"""The only value that the kernel by groups takes, and the one the others use."""

GROUP_SIZES = (16, 32, 64, 128)
_ROW_MULTIPLE = 4


class CudaQuantizers:
    """Rows [T, K] of float16 or bfloat16; see ``adapters.quantized.QuantizedOperations``."""

    def __init__(self, wheels: Wheels, selection: Selection, dtype: torch.dtype) -> None:
        self._kernels: Any = wheels.sgl_kernel
        provider = selection.provider("quantize.fp8_per_tensor", dtype)
        self._has_tensor_kernel = provider.package is Package.SGL_KERNEL

    def fp8_tensor(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(fp8 [T, K], float32 [1])."""
        if self._has_tensor_kernel:
            x, quantized = x.contiguous(), torch.empty(x.shape, dtype=FP8, device=x.device)
            # A scale that is computed is raised to the maximum that the kernel finds, so it starts at 0.
            given = x.new_zeros(1, dtype=torch.float32) if scale is None else scale.float().reshape(1)
            self._kernels.sgl_per_tensor_quant_fp8(x, quantized, given, is_static=scale is not None)
            return quantized, given
        if scale is None:
            scale = x.abs().amax().float().clamp(min=GROUP_EPSILON) / FP8_MAXIMUM
        scale = scale.float().reshape(1)
        return (x.float() / scale).clamp_(-FP8_MAXIMUM, FP8_MAXIMUM).to(FP8), scale

    def fp8_token(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(fp8 [T, K], float32 [T, 1])."""
        if x.shape[1] % _ROW_MULTIPLE:
            raise OperationInputError(f"rows to quantize must be a multiple of {_ROW_MULTIPLE} long, got {x.shape[1]}")
        quantized = torch.empty(x.shape, dtype=FP8, device=x.device)
        scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
        if x.shape[0]:
            self._kernels.sgl_per_token_quant_fp8(x.contiguous(), quantized, scale)
        return quantized, scale

    def fp8_group(self, x: Tensor, group_size: int = 128, *, column_major: bool = False) -> tuple[Tensor, Tensor]:
        """(fp8 [T, K], float32 [T, K/group_size]), the scales of one group of all rows side by side if asked for."""
        num_rows, width = x.shape
        if group_size not in GROUP_SIZES or width % group_size:
            raise OperationInputError(
                f"rows of {width} are quantized in groups of {', '.join(map(str, GROUP_SIZES))} that divide them, not "
                f"of {group_size}"
            )
        quantized = torch.empty(x.shape, dtype=FP8, device=x.device)
        shape = (num_rows, width // group_size)
        scale = torch.empty(shape[::-1] if column_major else shape, dtype=torch.float32, device=x.device)
        scale = scale.t() if column_major else scale
        if num_rows:
            self._kernels.sgl_per_token_group_quant_8bit(
                x.contiguous(),
                quantized,
                scale,
                group_size=group_size,
                eps=GROUP_EPSILON,
                fp8_min=-FP8_MAXIMUM,
                fp8_max=FP8_MAXIMUM,
                scale_ue8m0=False,
            )
        return quantized, scale

    def int8_token(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(int8 [T, K], float32 [T, 1]), in torch: the wheels have no such kernel."""
        scale = x.abs().amax(-1, keepdim=True).float().clamp_(min=GROUP_EPSILON) / INT8_MAXIMUM
        return (x.float() / scale).round_().clamp_(-INT8_MAXIMUM, INT8_MAXIMUM).to(torch.int8), scale
