"""From the tensors of a checkpoint to the quantized weights that the adapters know."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.dequantize import dequantize
from sglang_lite.adapters.quantized import (
    AwqWeight,
    Fp8Weight,
    GptqWeight,
    Int8Weight,
    Mxfp4Weight,
    PackedIntWeight,
    QuantizedWeight,
)
from sglang_lite.models.quantization import (
    AwqScheme,
    Fp8Scheme,
    GptqScheme,
    Granularity,
    Int8Scheme,
    Mxfp4Scheme,
    PackedIntScheme,
)
from sglang_lite.models.quantized_storage import StoredMatrix
from sglang_lite.types import StartupError


def read_stored(matrix: StoredMatrix, read: Callable[[str], Tensor]) -> QuantizedWeight:
    """The parts of a matrix as one weight.

    Args:
        matrix: found by ``quantized_storage.find_layout``, so that the parts have their shapes and types.
        read: a tensor of the checkpoint by name, as it is stored.

    Raises:
        StartupError: the values of a part contradict the others; names the tensor.
    """
    parts = {role: read(name) for role, name in matrix.parts.items()}
    weight, scale = parts["weight"], parts["scale"]
    _check_finite(matrix, scale)
    group_index = parts.get("group_index")
    match scheme := matrix.scheme:
        case Fp8Scheme():
            block = scheme.block if scheme.granularity is Granularity.BLOCK else None
            input_scale = parts.get("input_scale")
            single = scheme.granularity is Granularity.TENSOR
            return Fp8Weight(
                weight,
                scale.float().reshape(()) if single else scale.float(),
                block,
                None if input_scale is None else input_scale.float().reshape(()),
            )
        case Int8Scheme():
            return Int8Weight(weight, scale.float())
        case AwqScheme():
            return AwqWeight(weight, parts["zeros"], scale)
        case GptqScheme():
            _check_group_index(matrix, group_index, scale.shape[0])
            return GptqWeight(weight, parts["zeros"], scale, group_index, scheme.bits, scheme.zero_offset)
        case PackedIntScheme():
            if tuple(parts["shape"].tolist()) != matrix.shape:
                raise StartupError(
                    f"tensor {matrix.parts['shape']} says {parts['shape'].tolist()} where the matrix has shape "
                    f"{list(matrix.shape)}; config.json and the weights are of different models"
                )
            _check_group_index(matrix, group_index, scale.shape[1])
            return PackedIntWeight(weight, scale, matrix.shape[1], parts.get("zeros"), group_index, scheme.bits)
        case Mxfp4Scheme():
            return Mxfp4Weight(weight, scale)
        case _:
            assert_never(scheme)


def read_plain(matrix: StoredMatrix, read: Callable[[str], Tensor], dtype: torch.dtype) -> Tensor:
    """The matrix that the parts stand for, in the family's shape.

    Raises:
        StartupError: as ``read_stored``.
    """
    try:
        plain = dequantize(read_stored(matrix, read), dtype)
    except OperationInputError as error:
        raise StartupError(
            f"tensor {matrix.parts['weight']} and those with it cannot be dequantized: {error}; "
            f"download or convert the checkpoint again"
        ) from error
    return plain.transpose(-1, -2) if isinstance(matrix.scheme, Mxfp4Scheme) else plain


def _check_finite(matrix: StoredMatrix, scale: Tensor) -> None:
    """A damaged scale would turn whole rows of every result into nothing but NaN."""
    if scale.is_floating_point() and not bool(torch.isfinite(scale.float()).all()):
        raise StartupError(
            f"tensor {matrix.parts['scale']} holds scales that are not finite numbers; "
            f"download or convert the checkpoint again"
        )


def _check_group_index(matrix: StoredMatrix, group_index: Tensor | None, num_groups: int) -> None:
    if group_index is None or not group_index.numel():
        return
    lowest, highest = int(group_index.min()), int(group_index.max())
    if lowest < 0 or highest >= num_groups:
        raise StartupError(
            f"tensor {matrix.parts['group_index']} names groups {lowest} to {highest}, but there are only groups 0 to "
            f"{num_groups - 1}; download or convert the checkpoint again"
        )
