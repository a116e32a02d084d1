"""Adapted products on a device: all slots at once, what is not a token's own masked out.

A step reads the small matrices of every slot, and its shapes do not depend on which adapters it mixes: nothing waits
for the host, and a captured graph serves any mix. For S slots of rank R that is S * R further outputs of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_lite.adapters.lora import NO_ADAPTER, AdapterBatch
from sglang_lite.types import Int32Array


@dataclass(frozen=True, slots=True)
class MaskedAdapterBatch:
    """``slots``: int64[T, 1] on the device, ``NO_ADAPTER`` for the tokens without one."""

    slots: Tensor


class MaskedAdapters:
    """``AdapterOperations`` in torch, for devices where many small products cost more than one larger one.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan(self, token_slots: Int32Array) -> AdapterBatch | None:
        """Send the slots to the device."""
        if (token_slots == NO_ADAPTER).all():
            return None
        slots = torch.from_numpy(token_slots).unsqueeze(1)
        return MaskedAdapterBatch(slots.to(self._device, torch.int64, non_blocking=True))

    def add_product(self, output: Tensor, x: Tensor, a: Tensor, b: Tensor, batch: AdapterBatch) -> None:
        """Two products over all slots with the mask between them."""
        if not isinstance(batch, MaskedAdapterBatch):
            raise TypeError(f"the batch must come from plan of these operations, not {type(batch).__name__}")
        num_slots, rank, _ = a.shape
        own = batch.slots == torch.arange(num_slots, device=self._device)
        reduced = torch.mm(x, a.flatten(0, 1).t()).view(-1, num_slots, rank)
        # Not a product with 0 or 1: what another adapter makes of this token may be infinite.
        masked = reduced.masked_fill_(~own.unsqueeze(2), 0)
        output.addmm_(masked.flatten(1), b.flatten(0, 1))
