"""The gated feed-forward block (SwiGLU)."""

from __future__ import annotations

from torch import Tensor

from sglang_lite.adapters.base import Operations, PackedLinear


class GatedMLP:
    """down(silu(gate(x)) * up(x)).

    Args:
        gate_up_proj: hidden -> 2 I, the rows of gate, then up.
        down_proj: I -> hidden.
    """

    __slots__ = ("_down_proj", "_gate_up_proj", "_ops")

    def __init__(self, ops: Operations, gate_up_proj: PackedLinear, down_proj: PackedLinear) -> None:
        self._ops = ops
        self._gate_up_proj = gate_up_proj
        self._down_proj = down_proj

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self._down_proj(self._ops.silu_and_mul(self._gate_up_proj(x)))
