"""Protocol of the operations of recurrent layers: causal convolution and the gated delta rule.

Shapes use T tokens of a step, B rows of a step, R rows of the state pool, C channels, K taps, Hk key heads, Hv value
heads (Hk divides Hv; consecutive value heads share a key head), dk and dv head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecurrentBatch:
    """What recurrent layers need to know of a step.

    Attributes:
        num_decode: the first ``num_decode`` rows have one token each and continue; the rest are prefill chunks.
        query_lens: list[int] of length B, tokens of each row, at least 1.
        rows: list[int] of length B, where each row's state is in the pool; no row twice.
        fresh: list[bool] of length B: the row starts a new sequence, so that whatever its state holds is not read.
    """

    num_decode: int
    query_lens: list[int]
    rows: list[int]
    fresh: list[bool]


class RecurrentPlan(Protocol):
    """Work common to all recurrent layers of one step, made once by ``RecurrentOperations.plan``."""


class RecurrentOperations(Protocol):
    """The recurrent operations of one device.

    States are read and written in place, and only at the rows of the plan: each is left as it is after the row's last
    token of the step. Splitting a sequence into steps anywhere gives what one step gives, up to rounding.
    """

    def plan(self, batch: RecurrentBatch) -> RecurrentPlan:
        """Prepare indices of a step once for all layers."""

    def causal_conv(self, x: Tensor, weight: Tensor, state: Tensor, plan: RecurrentPlan) -> Tensor:
        """silu of a depthwise convolution over each row's tokens, and over the K - 1 tokens before them.

        x [T, C] in the order of the rows; weight [C, K], its last tap meets the newest token; state [R, C, K - 1],
        the last inputs of each row, oldest first, in the type of ``x``. Returns [T, C] in the type of ``x``.
        """

    def gated_delta(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        state: Tensor,
        plan: RecurrentPlan,
    ) -> Tensor:
        """The gated delta rule (arXiv 2412.06464; per-channel decay: arXiv 2510.26692), in float32.

        Per token and value head, S being the row's state [dk, dv]:
        ``S *= exp(log_decay); S += outer(k, (v - k @ S) * beta); out = q @ S``, where q and k are L2-normalised
        (x * rsqrt(sum(x^2) + 1e-6)) and q is scaled by dk^-0.5 besides.

        query, key [T, Hk, dk]; value [T, Hv, dv]; log_decay float32, [T, Hv] or, one value per channel of the key,
        [T, Hv, dk], never positive; beta [T, Hv]; state float32[R, Hv, dk, dv].
        Returns [T, Hv, dv] in the type of ``value``.
        """
