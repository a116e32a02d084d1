"""The mixture-of-experts feed-forward block: router, routed experts, shared experts."""

from __future__ import annotations

from torch import Tensor

from sglang_lite.adapters.base import Operations, PackedLinear
from sglang_lite.adapters.moe import PackedExperts, Routing
from sglang_lite.layers.feed_forward import FeedForward
from sglang_lite.layers.parallel import SINGLE, ParallelGroup


class SparseMLP:
    """Each token goes through the experts that its router chooses, and through the shared experts if there are any.

    Routed and shared experts are split over the ranks alike, so their sum is added up over the ranks once.

    Args:
        router: hidden -> one logit an expert, whole on every rank.
        routing: how logits become experts and weights.
        experts: the routed experts, or this rank's part of them.
        correction_bias: float32[E], added to the scores that experts are chosen by; None without any.
        shared: block that every token goes through, its result not yet summed over the ranks; None without any.
        shared_gate: hidden -> 1, whose logistic function scales the shared result; None leaves it unscaled.
        group: the ranks that share the model.
    """

    __slots__ = ("_correction_bias", "_experts", "_group", "_ops", "_router", "_routing", "_shared", "_shared_gate")

    def __init__(
        self,
        ops: Operations,
        router: PackedLinear,
        routing: Routing,
        experts: PackedExperts,
        *,
        correction_bias: Tensor | None = None,
        shared: FeedForward | None = None,
        shared_gate: PackedLinear | None = None,
        group: ParallelGroup = SINGLE,
    ) -> None:
        self._ops = ops
        self._router = router
        self._routing = routing
        self._experts = experts
        self._correction_bias = correction_bias
        self._shared = shared
        self._shared_gate = shared_gate
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        ids, weights = self._ops.moe.route(self._router(x), self._routing, self._correction_bias)
        output = self._experts(x, ids, weights)
        if self._shared is not None:
            shared = self._shared(x)
            if self._shared_gate is not None:
                shared = self._shared_gate(x).sigmoid() * shared
            output += shared
        return output if self._group.size == 1 else self._group.all_reduce(output)
