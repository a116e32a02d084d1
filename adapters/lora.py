"""Low-rank adapters: the protocol of their operations.

An adapter adds B A x to a linear layer W x. All adapters that are loaded lie in slots of one pair of tensors a layer,
so that a batch may mix them. For S slots, ``a`` [S, R, in] is A and ``b`` [S, R, out] the transpose of B, with the
scaling folded into ``b`` and ranks below R padded with zeros.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sglang_lite.types import NO_ADAPTER, Int32Array

__all__ = ["NO_ADAPTER", "AdapterBatch", "AdapterOperations"]


class AdapterBatch(Protocol):
    """Which tokens of a step use which slot, prepared once for all layers."""


class AdapterOperations(Protocol):
    """Adapted products of one device."""

    def plan(self, token_slots: Int32Array) -> AdapterBatch | None:
        """Prepare a step of T tokens.

        ``token_slots``: int32[T], slot of each token or ``NO_ADAPTER``. None when no token has one.
        """

    def add_product(self, output: Tensor, x: Tensor, a: Tensor, b: Tensor, batch: AdapterBatch) -> None:
        """output[t] += b[slot(t)]^T a[slot(t)] x[t] for the tokens that have a slot, in place.

        output [T, out] and x [T, in] of one dtype; a [S, R, in] and b [S, R, out] of the same.
        """
