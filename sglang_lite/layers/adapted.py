"""Linear layers that low-rank adapters change, and the slots in which the adapters lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_lite.adapters.base import Operations, PackedLinear
from sglang_lite.adapters.lora import AdapterBatch
from sglang_lite.types import Int32Array


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """What one adapter does to one projection: y += b a x.

    Attributes:
        a: [r, in].
        b: [out, r], the scaling folded in.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """Place of a projection in the layer it was merged into.

    Attributes:
        layer: the layer.
        rows: its outputs in the merged layer.
        columns: its part of the merged rank.
    """

    layer: AdaptedLinear
    rows: slice
    columns: slice


class AdapterSlots:
    """The slots of all adapted layers of a model. A step chooses for each of its tokens a slot or none.

    Args:
        ops: operations of the device.
        num_slots: adapters that can be loaded at a time.
        max_rank: the largest rank an adapter may have.
        targets: last parts of the names of the projections that adapters may change ("q_proj"); None for all that
            the model's loader wraps.
    """

    def __init__(self, ops: Operations, num_slots: int, max_rank: int, targets: frozenset[str] | None = None) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self._ops = ops
        self._targets = targets
        self._parts: dict[str, _Part] = {}
        self.batch: AdapterBatch | None = None

    def wrap(self, base: PackedLinear, names: Sequence[str], rows: Sequence[int], dtype: torch.dtype) -> PackedLinear:
        """A layer that adapters may change, or ``base`` itself when none may.

        Args:
            base: the layer.
            names: weight tensors it was merged from.
            rows: outputs of each of them, in the same order.
            dtype: of the layer's inputs and outputs.
        """
        chosen = [name for name in names if self._targets is None or projection_name(name) in self._targets]
        if not chosen:
            return base
        layer = AdaptedLinear(base, self, len(names), dtype)
        start = 0
        for index, (name, count) in enumerate(zip(names, rows, strict=True)):
            if name in chosen:
                columns = slice(index * self.max_rank, (index + 1) * self.max_rank)
                self._parts[name] = _Part(layer, slice(start, start + count), columns)
            start += count
        return layer

    @property
    def num_bytes(self) -> int:
        """Of the slots of all layers."""
        layers = {id(part.layer): part.layer for part in self._parts.values()}
        return sum(layer.a.nbytes + layer.b.nbytes for layer in layers.values())

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """Weight name -> (out, in) of every projection that an adapter may change."""
        return {name: (part.rows.stop - part.rows.start, part.layer.in_features) for name, part in self._parts.items()}

    @torch.inference_mode()
    def install(self, slot: int, weights: Mapping[str, AdapterWeights]) -> None:
        """Put an adapter into a slot; projections that it does not name stay as the base model has them."""
        self.clear(slot)
        for name, pair in weights.items():
            part = self._parts[name]
            rank = pair.a.shape[0]
            columns = slice(part.columns.start, part.columns.start + rank)
            part.layer.a[slot, columns].copy_(pair.a)
            part.layer.b[slot, columns, part.rows].copy_(pair.b.t())

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Take the adapter out of a slot."""
        for layer in self._layers():
            layer.a[slot].zero_()
            layer.b[slot].zero_()

    def select(self, token_slots: Int32Array | None) -> None:
        """Choose the adapters of the next step: int32[T], slot of each token or ``NO_ADAPTER``; None for none."""
        self.batch = None if token_slots is None else self._ops.lora.plan(token_slots)

    def add_product(self, output: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
        """Add what the step's adapters contribute to a layer, in place."""
        if self.batch is not None:
            self._ops.lora.add_product(output, x, a, b, self.batch)

    def allocate(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros on the device."""
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self._ops.device)

    def _layers(self) -> Iterator[AdaptedLinear]:
        return iter({id(part.layer): part.layer for part in self._parts.values()}.values())


class AdaptedLinear:
    """A linear layer with the slots of its adapters: base(x) + b[slot]^T a[slot] x.

    Projections merged by rows have matrices ``a`` of their own, one below the other, and ``b`` is zero outside their
    blocks, so that two products serve all of them.

    Attributes:
        a: [slots, parts * max_rank, in]; b: [slots, parts * max_rank, out].
    """

    __slots__ = ("_base", "_slots", "a", "b", "in_features", "out_features")

    def __init__(self, base: PackedLinear, slots: AdapterSlots, num_parts: int, dtype: torch.dtype) -> None:
        self.in_features, self.out_features = base.in_features, base.out_features
        self._base = base
        self._slots = slots
        rank = num_parts * slots.max_rank
        self.a = slots.allocate(slots.num_slots, rank, self.in_features, dtype=dtype)
        self.b = slots.allocate(slots.num_slots, rank, self.out_features, dtype=dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        output = self._base(x)
        if self._slots.batch is not None:
            self._slots.add_product(output.view(-1, self.out_features), x.reshape(-1, self.in_features), self.a, self.b)
        return output


def projection_name(weight_name: str) -> str:
    """``model.layers.0.self_attn.q_proj.weight`` -> ``q_proj``."""
    return weight_name.removesuffix(".weight").rpartition(".")[2]
