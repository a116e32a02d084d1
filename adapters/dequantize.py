"""Stored quantized weights to plain matrices, in torch on whatever device they are on.

All values are computed in float32 and then cast. Leading dimensions (experts) may stand before every shape.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.quantized import (
    AwqWeight,
    Fp8Weight,
    GptqWeight,
    Int8Weight,
    Mxfp4Weight,
    Nvfp4Weight,
    PackedIntWeight,
    QuantizedWeight,
)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output that each nibble of an AWQ word holds, from the lowest bits on."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each four-bit float with one sign, two exponent and one mantissa bit."""

E8M0_BIAS = 127
"""Exponent bias of the power-of-two scales of MXFP4."""


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Any stored weight as [N, K] of ``dtype``.

    Raises:
        OperationInputError: its tensors do not fit together.
    """
    match weight:
        case Fp8Weight():
            return dequantize_fp8(weight.weight, weight.scale, weight.block).to(dtype)
        case Int8Weight():
            return dequantize_fp8(weight.weight, weight.scale, None).to(dtype)
        case AwqWeight():
            return dequantize_awq(weight.qweight, weight.qzeros, weight.scales).to(dtype)
        case GptqWeight():
            return dequantize_gptq(weight).to(dtype)
        case PackedIntWeight():
            return dequantize_packed_int(weight).to(dtype)
        case Mxfp4Weight():
            return dequantize_mxfp4(weight.blocks, weight.scales).to(dtype)
        case Nvfp4Weight():
            return dequantize_nvfp4(weight.packed, weight.scale, weight.global_scale).to(dtype)
    assert_never(weight)


def dequantize_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int] | None = None) -> Tensor:
    """float8 or int8 [N, K] times a scale for all, one an output, or one a block: float32 [N, K].

    ``scale``: [], [1], [N], [N, 1], or with ``block`` (bn, bk) [ceil(N/bn), ceil(K/bk)].
    """
    num_rows, num_columns = weight.shape[-2:]
    scale = scale.float()
    if block is None:
        if scale.numel() == 1:
            return weight.float() * scale.reshape(())
        if scale.shape == (*weight.shape[:-2], 1, 1) or scale.shape == (*weight.shape[:-1], 1):
            return weight.float() * scale
        if scale.shape == weight.shape[:-1]:
            return weight.float() * scale.unsqueeze(-1)
        if scale.shape == weight.shape[:-2]:
            return weight.float() * scale[..., None, None]
        raise OperationInputError(
            f"a scale of shape {list(scale.shape)} is neither one for the tensor nor one for each output of "
            f"{list(weight.shape)}"
        )
    rows, columns = block
    expected = (*weight.shape[:-2], -(-num_rows // rows), -(-num_columns // columns))
    if scale.shape != expected:
        raise OperationInputError(
            f"blocks of {rows}x{columns} in {list(weight.shape)} need scales {list(expected)}, got {list(scale.shape)}"
        )
    expanded = scale.repeat_interleave(rows, -2)[..., :num_rows, :].repeat_interleave(columns, -1)[..., :num_columns]
    return weight.float() * expanded


def dequantize_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """AWQ four bits: int32 [K, N/8], int32 [K/g, N/8], [K/g, N] -> float32 [N, K]."""
    order = torch.tensor(AWQ_ORDER, device=qweight.device).argsort()
    values = _in_order(unpack_words(qweight, 4), order)
    zeros = _in_order(unpack_words(qzeros, 4), order)
    return _grouped(values, zeros, scales, None).transpose(-1, -2).contiguous()


def dequantize_gptq(weight: GptqWeight) -> Tensor:
    """float32 [N, K]."""
    values = unpack_words(weight.qweight.transpose(-1, -2), weight.bits).transpose(-1, -2)
    zeros = unpack_words(weight.qzeros, weight.bits) + weight.zero_offset
    return _grouped(values, zeros, weight.scales, weight.group_index).transpose(-1, -2).contiguous()


def dequantize_packed_int(weight: PackedIntWeight) -> Tensor:
    """float32 [N, K]."""
    offset = 1 << (weight.bits - 1)
    values = unpack_words(weight.packed, weight.bits)[..., : weight.in_features] - offset
    scale = weight.scale
    if weight.zero_point is None:
        zeros = torch.zeros_like(scale, dtype=torch.int32)
    else:
        zeros = unpack_words(weight.zero_point.transpose(-1, -2), weight.bits).transpose(-1, -2)
        zeros = zeros[..., : scale.shape[-2], :] - offset
    by_input = _grouped(values.transpose(-1, -2), zeros.transpose(-1, -2), scale.transpose(-1, -2), weight.group_index)
    return by_input.transpose(-1, -2).contiguous()


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 [N, K/32, 16], uint8 [N, K/32] -> float32 [N, K]."""
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
        raise OperationInputError(
            f"MXFP4 blocks must be [..., K/32, 16] beside scales [..., K/32], got {list(blocks.shape)} and "
            f"{list(scales.shape)}"
        )
    values = unpack_e2m1(blocks)
    return torch.ldexp(values, (scales.to(torch.int32) - E8M0_BIAS).unsqueeze(-1)).flatten(-2)


def dequantize_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """uint8 [N, K/2], float8 [N, K/16], float32 -> float32 [N, K]."""
    values = unpack_e2m1(packed)
    if scale.shape != (*packed.shape[:-1], packed.shape[-1] // 8) or packed.shape[-1] % 8:
        raise OperationInputError(
            f"NVFP4 values {list(packed.shape)} need one scale for 8 bytes, got scales {list(scale.shape)}"
        )
    factors = scale.float() * global_scale.float().reshape(
        *global_scale.shape, *[1] * (scale.dim() - global_scale.dim())
    )
    return (values.view(*scale.shape, 16) * factors.unsqueeze(-1)).flatten(-2)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> int32 [..., n * 32 / bits], each word's values from the lowest bits on."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> float32 [..., 2n], the low nibble first."""
    table = torch.tensor(E2M1_VALUES, device=packed.device)
    nibbles = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)
    return table[nibbles.int()]


def _in_order(values: Tensor, order: Tensor) -> Tensor:
    """Reorder every eight neighbours of the last dimension."""
    return values.reshape(*values.shape[:-1], -1, 8)[..., order].flatten(-2)


def _grouped(values: Tensor, zeros: Tensor, scales: Tensor, group_index: Tensor | None) -> Tensor:
    """(values [K, N] - zeros [G, N]) * scales [G, N], inputs in groups in order or by index: float32 [K, N]."""
    num_inputs, num_groups = values.shape[-2], scales.shape[-2]
    if zeros.shape != scales.shape or values.shape[-1] != scales.shape[-1]:
        raise OperationInputError(
            f"quantized values [K, N] {list(values.shape)} do not fit zeros {list(zeros.shape)} and scales "
            f"{list(scales.shape)}, both [groups, N]"
        )
    if group_index is None:
        if num_inputs % num_groups:
            raise OperationInputError(f"{num_inputs} inputs cannot be split into {num_groups} equal groups")
        size = num_inputs // num_groups
        grouped = values.reshape(*scales.shape[:-1], size, values.shape[-1]) - zeros.unsqueeze(-2)
        return (grouped.float() * scales.float().unsqueeze(-2)).flatten(-3, -2)
    index = group_index.long()
    if index.shape != (*values.shape[:-2], num_inputs) or (
        index.numel() and not 0 <= int(index.min()) <= int(index.max()) < num_groups
    ):
        raise OperationInputError(
            f"the group index must name one of {num_groups} groups for each of {num_inputs} inputs, got shape "
            f"{list(index.shape)}"
        )
    by_input = index.unsqueeze(-1).expand(values.shape)
    return (values - zeros.gather(-2, by_input)).float() * scales.float().gather(-2, by_input)
