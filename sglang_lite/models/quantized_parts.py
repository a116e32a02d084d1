"""Parts of quantized weights, and quantized weights of one input joined into one.

Words of several values, groups and blocks cannot be cut everywhere. Where a format does not allow what is asked for,
the answer is None, and the caller takes the plain values instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import torch
from torch import Tensor

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
from sglang_lite.models.quantization import WORD_BITS
from sglang_lite.models.weight_reader import Shard

_AWQ_BITS = 4


def shard_of(weight: QuantizedWeight, shard: Shard, shape: tuple[int, ...]) -> QuantizedWeight | None:
    """A rank's part of a weight of ``shape`` [out, in].

    An extent that does not divide is refused where the plain values are read.
    """
    extent, remainder = divmod(shape[shard.dim], shard.count)
    if remainder:
        return None
    cut = rows_of if shard.dim == 0 else columns_of
    return cut(weight, shard.index * extent, (shard.index + 1) * extent)


def rows_of(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight | None:
    """The outputs ``start`` to ``stop``: a rank's part of a layer split by output."""
    match weight:
        case Fp8Weight():
            block = weight.block
            if block is not None and not _whole(start, stop, block[0], weight.weight.shape[0]):
                return None
            scale = _scale_rows(weight.scale, weight.weight.shape[0], start, stop, block)
            return dataclasses.replace(weight, weight=weight.weight[start:stop], scale=scale)
        case Int8Weight():
            scale = _scale_rows(weight.scale, weight.weight.shape[0], start, stop, None)
            return Int8Weight(weight.weight[start:stop], scale)
        case AwqWeight():
            words = _word_slice(start, stop, _AWQ_BITS)
            if words is None:
                return None
            return AwqWeight(weight.qweight[:, words], weight.qzeros[:, words], weight.scales[:, start:stop])
        case GptqWeight():
            words = _word_slice(start, stop, weight.bits)
            if words is None:
                return None
            return dataclasses.replace(
                weight,
                qweight=weight.qweight[:, start:stop],
                qzeros=weight.qzeros[:, words],
                scales=weight.scales[:, start:stop],
            )
        case PackedIntWeight():
            zero_point = weight.zero_point
            if zero_point is not None:
                words = _word_slice(start, stop, weight.bits)
                if words is None:
                    return None
                zero_point = zero_point[words]
            return dataclasses.replace(
                weight, packed=weight.packed[start:stop], scale=weight.scale[start:stop], zero_point=zero_point
            )
        case Mxfp4Weight():
            return Mxfp4Weight(weight.blocks[start:stop], weight.scales[start:stop])
        case Nvfp4Weight():
            return Nvfp4Weight(weight.packed[start:stop], weight.scale[start:stop], weight.global_scale)
    assert_never(weight)


def columns_of(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight | None:
    """The inputs ``start`` to ``stop``: a rank's part of a layer split by input."""
    match weight:
        case Fp8Weight():
            block, scale = weight.block, weight.scale
            if block is not None:
                if not _whole(start, stop, block[1], weight.weight.shape[1]):
                    return None
                scale = scale[:, start // block[1] : -(-stop // block[1])]
            return dataclasses.replace(weight, weight=weight.weight[:, start:stop], scale=scale)
        case Int8Weight():
            return Int8Weight(weight.weight[:, start:stop], weight.scale)
        case AwqWeight():
            groups = _group_slice(start, stop, weight.qweight.shape[0], weight.scales.shape[0])
            if groups is None:
                return None
            return AwqWeight(weight.qweight[start:stop], weight.qzeros[groups], weight.scales[groups])
        case GptqWeight():
            words = _word_slice(start, stop, weight.bits)
            if words is None:
                return None
            if weight.group_index is not None:
                index = weight.group_index[start:stop]
                return dataclasses.replace(weight, qweight=weight.qweight[words], group_index=index)
            inputs = weight.qweight.shape[0] * (WORD_BITS // weight.bits)
            groups = _group_slice(start, stop, inputs, weight.scales.shape[0])
            if groups is None:
                return None
            return dataclasses.replace(
                weight, qweight=weight.qweight[words], qzeros=weight.qzeros[groups], scales=weight.scales[groups]
            )
        case PackedIntWeight():
            return _packed_columns(weight, start, stop)
        case Mxfp4Weight():
            blocks = _group_slice(start, stop, 32 * weight.scales.shape[-1], weight.scales.shape[-1])
            return None if blocks is None else Mxfp4Weight(weight.blocks[:, blocks], weight.scales[:, blocks])
        case Nvfp4Weight():
            groups = _group_slice(start, stop, 16 * weight.scale.shape[-1], weight.scale.shape[-1])
            if groups is None:
                return None
            return Nvfp4Weight(weight.packed[:, start // 2 : stop // 2], weight.scale[:, groups], weight.global_scale)
    assert_never(weight)


def _packed_columns(weight: PackedIntWeight, start: int, stop: int) -> PackedIntWeight | None:
    words = _word_slice(start, stop, weight.bits)
    if words is None:
        return None
    part = dataclasses.replace(weight, packed=weight.packed[:, words], in_features=stop - start)
    if weight.group_index is not None:
        return dataclasses.replace(part, group_index=weight.group_index[start:stop])
    groups = _group_slice(start, stop, weight.in_features, weight.scale.shape[1])
    if groups is None:
        return None
    zero_point = None if weight.zero_point is None else weight.zero_point[:, groups]
    return dataclasses.replace(part, scale=weight.scale[:, groups], zero_point=zero_point)


def join_rows(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Weights of the same input, one below the other: [N1, K], [N2, K] ... as [N1 + N2 + ..., K].

    Those with one scale for the whole tensor get one an output. Input scales become the largest of all, which is what
    every one of the inputs fits in.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if any(type(weight) is not type(first) for weight in weights):
        return None
    match first:
        case Fp8Weight():
            return _join_fp8([weight for weight in weights if isinstance(weight, Fp8Weight)])
        case Int8Weight():
            parts = [weight for weight in weights if isinstance(weight, Int8Weight)]
            scales = [_scale_per_row(part.scale, part.weight.shape[0]) for part in parts]
            return Int8Weight(torch.cat([part.weight for part in parts]), torch.cat(scales))
        case AwqWeight():
            return AwqWeight(_cat(weights, "qweight", 1), _cat(weights, "qzeros", 1), _cat(weights, "scales", 1))
        case GptqWeight():
            if not _same_order(weights):
                return None
            return dataclasses.replace(
                first,
                qweight=_cat(weights, "qweight", 1),
                qzeros=_cat(weights, "qzeros", 1),
                scales=_cat(weights, "scales", 1),
            )
        case PackedIntWeight():
            if not _same_order(weights):
                return None
            zero_point = None if first.zero_point is None else _cat(weights, "zero_point", 0)
            return dataclasses.replace(
                first, packed=_cat(weights, "packed", 0), scale=_cat(weights, "scale", 0), zero_point=zero_point
            )
        case Mxfp4Weight():
            return Mxfp4Weight(_cat(weights, "blocks", 0), _cat(weights, "scales", 0))
        case Nvfp4Weight():
            return None
    assert_never(first)


def _join_fp8(weights: Sequence[Fp8Weight]) -> Fp8Weight | None:
    first = weights[0]
    if any(weight.block != first.block for weight in weights):
        return None
    if first.block is not None:
        if any(weight.weight.shape[0] % first.block[0] for weight in weights[:-1]):
            return None
        scale = torch.cat([weight.scale for weight in weights])
    else:
        scale = torch.cat([_scale_per_row(weight.scale, weight.weight.shape[0]) for weight in weights])
    # torch.cat of float8 is not there on every device; the bytes are the same.
    stacked = torch.cat([weight.weight.view(torch.uint8) for weight in weights]).view(first.weight.dtype)
    input_scales = [weight.input_scale for weight in weights if weight.input_scale is not None]
    input_scale = torch.stack(input_scales).max() if len(input_scales) == len(weights) else None
    return Fp8Weight(stacked, scale, first.block, input_scale)


def _cat(weights: Sequence[QuantizedWeight], name: str, dim: int) -> Tensor:
    """The field ``name`` of all, joined along a dimension."""
    return torch.cat([getattr(weight, name) for weight in weights], dim)


def _same_order(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether the inputs of all are in the same groups, so that one index serves them all."""
    indices = [getattr(weight, "group_index", None) for weight in weights]
    if indices[0] is None:
        return all(index is None for index in indices)
    return all(index is not None and torch.equal(index, indices[0]) for index in indices)


def map_tensors(weight: QuantizedWeight, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
    """The weight with every tensor of it changed: moved to a device, for instance."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(weight):
        value = getattr(weight, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = change(value)
    return dataclasses.replace(weight, **changes)


def _scale_per_row(scale: Tensor, rows: int) -> Tensor:
    """float32 [rows, 1] of a scale for all or one a row."""
    return scale.reshape(1, 1).expand(rows, 1) if scale.numel() == 1 else scale.reshape(rows, 1)


def _scale_rows(scale: Tensor, rows: int, start: int, stop: int, block: tuple[int, int] | None) -> Tensor:
    if block is not None:
        return scale[start // block[0] : -(-stop // block[0])]
    return scale if scale.numel() == 1 and rows > 1 else scale[start:stop]


def _whole(start: int, stop: int, side: int, extent: int) -> bool:
    """Whether a span begins and ends where blocks do."""
    return start % side == 0 and (stop % side == 0 or stop == extent)


def _word_slice(start: int, stop: int, bits: int) -> slice | None:
    per_word = WORD_BITS // bits
    return None if start % per_word or stop % per_word else slice(start // per_word, stop // per_word)


def _group_slice(start: int, stop: int, inputs: int, num_groups: int) -> slice | None:
    """The groups of a span of inputs. A single group stays whole whatever the span."""
    if num_groups == 1:
        return slice(None)
    size = inputs // num_groups
    return None if start % size or stop % size else slice(start // size, stop // size)
