"""The gated feed-forward block (SwiGLU, or another gated activation)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sglang_lite.adapters.base import Operations, PackedLinear


class GatedMLP:
    """down(silu(gate(x)) * up(x)).

    Args:
        gate_up_proj: hidden -> 2 I, the rows of gate, then up.
        down_proj: I -> hidden.
        activation: [T, 2I] -> [T, I] in place of silu(first half) * second half.
    """

    __slots__ = ("_activation", "_down_proj", "_gate_up_proj")

    def __init__(
        self,
        ops: Operations,
        gate_up_proj: PackedLinear,
        down_proj: PackedLinear,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._activation = activation or ops.silu_and_mul
        self._gate_up_proj = gate_up_proj
        self._down_proj = down_proj

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self._down_proj(self._activation(self._gate_up_proj(x)))
