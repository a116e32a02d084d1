"""Adapted products on the host: the tokens of each adapter go through its two small matrices together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.lora import NO_ADAPTER, AdapterBatch
from sglang_lite.types import Int32Array


@dataclass(frozen=True, slots=True)
class CpuAdapterBatch:
    """Tokens by adapter.

    Attributes:
        groups: (slot, int64[n] of its tokens, or None for all tokens of the step).
    """

    groups: tuple[tuple[int, Tensor | None], ...]


class CpuAdapters:
    """``AdapterOperations`` on the host. The loop is over the adapters of a step, of which there are a few."""

    def plan(self, token_slots: Int32Array) -> AdapterBatch | None:
        """Group the tokens by slot."""
        slots, counts = np.unique(token_slots, return_counts=True)
        if len(slots) == 1:
            slot = int(slots[0])
            return None if slot == NO_ADAPTER else CpuAdapterBatch(((slot, None),))
        # A stable sort by slot puts each adapter's tokens side by side, in their order.
        order = torch.from_numpy(np.argsort(token_slots, kind="stable"))
        tokens = order.split_with_sizes(counts.tolist())
        pairs = zip(slots.tolist(), tokens, strict=True)
        return CpuAdapterBatch(tuple((slot, index) for slot, index in pairs if slot != NO_ADAPTER))

    def add_product(self, output: Tensor, x: Tensor, a: Tensor, b: Tensor, batch: AdapterBatch) -> None:
        """One pair of products for each adapter of the step."""
        if not isinstance(batch, CpuAdapterBatch):
            raise TypeError(f"the batch must come from plan of these operations, not {type(batch).__name__}")
        for slot, tokens in batch.groups:
            if tokens is None:
                output.addmm_(torch.mm(x, a[slot].t()), b[slot])
            else:
                reduced = torch.mm(x.index_select(0, tokens), a[slot].t())
                output.index_add_(0, tokens, torch.mm(reduced, b[slot]))
