"""What recurrent layers get of a step: where the rows' states are, and which rows and tokens they belong to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sglang_lite.adapters.recurrent import RecurrentPlan


@dataclass(frozen=True, slots=True)
class RecurrentStep:
    """The states of all rows and recurrent layers, and the step's plan over them.

    Attributes:
        plan: of ``ops.recurrent``.
        tails: [layers, rows, C, K - 1], last inputs of the convolutions, in the type of the activations.
        states: float32[layers, rows, Hv, dk, dv].
    """

    plan: RecurrentPlan
    tails: Tensor
    states: Tensor
