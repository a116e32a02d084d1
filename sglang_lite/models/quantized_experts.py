"""Routed experts that stay as a checkpoint stores them, where the device has a kernel for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_lite.adapters.base import Operations
from sglang_lite.adapters.moe import ExpertActivation
from sglang_lite.adapters.quantized import QuantizedWeight
from sglang_lite.layers.parallel import ExpertPart
from sglang_lite.models.quantized_parts import join_rows, map_tensors, shard_of
from sglang_lite.models.weight_reader import Shard, WeightReader


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """This rank's experts of one layer, as they are stored, on the device.

    Attributes:
        w13: [E, 2I, H], gate above up; w2: [E, H, I].
    """

    w13: QuantizedWeight
    w2: QuantizedWeight


def read_quantized_experts(
    reader: WeightReader, ops: Operations, prefix: str, part: ExpertPart, activation: ExpertActivation
) -> QuantizedExperts | None:
    """The experts with separate gate, up and down matrices, or None when they have to be read as plain values: they
    are stored plain, their format cannot be cut or joined there, or the device has no product for them.

    Args:
        prefix: of the layer's experts, up to their numbers.

    Raises:
        StartupError: a tensor cannot be read.
    """
    pairs: list[tuple[QuantizedWeight, QuantizedWeight]] = []
    for expert in range(part.first, part.first + part.count):
        gate, up, down = (
            _part(reader, f"{prefix}{expert}.{name}_proj.weight", part, dim)
            for name, dim in (("gate", 0), ("up", 0), ("down", 1))
        )
        gate_up = join_rows([gate, up]) if gate is not None and up is not None else None
        if gate_up is None or down is None:
            return None
        # One expert is enough to ask about its kind, and a refusal saves reading the others.
        if ops.quantized.experts_refusal(_stacked([gate_up]), _stacked([down]), activation) is not None:
            return None
        pairs.append((map_tensors(gate_up, _to(ops.device)), map_tensors(down, _to(ops.device))))
    return QuantizedExperts(_stacked([w13 for w13, _ in pairs]), _stacked([w2 for _, w2 in pairs]))


def _stacked(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights of one kind and shape with a leading dimension of experts."""
    first = weights[0]
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(first):
        values = [getattr(weight, field.name) for weight in weights]
        if isinstance(values[0], Tensor):
            changes[field.name] = _stack(values)
    return dataclasses.replace(first, **changes)


def _part(reader: WeightReader, name: str, part: ExpertPart, dim: int) -> QuantizedWeight | None:
    whole = reader.read_quantized(name)
    if whole is None or part.width_parts == 1:
        return whole
    return shard_of(whole, Shard(dim, part.width_index, part.width_parts), reader.shape_of(name))


def _to(device: torch.device) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(device)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Float8 is stacked as bytes: devices lack the operation for its type."""
    if tensors[0].dtype.is_floating_point and tensors[0].dtype.itemsize == 1:
        return torch.stack([tensor.contiguous().view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
    return torch.stack(list(tensors))
