"""Protocol of mixture-of-experts operations: route tokens to experts, group them, run the experts.

Shapes use T tokens, E experts, K experts a token, H hidden size, I intermediate size of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor


class Scoring(StrEnum):
    """How router logits become scores. All of it is computed in float32."""

    SOFTMAX = "softmax"  # over all experts, then the top K
    SIGMOID = "sigmoid"  # one logistic function an expert, then the top K
    TOP_K_SOFTMAX = "top_k_softmax"  # the top K logits, then softmax over those K


class GroupScore(StrEnum):
    """What a group of experts is ranked by when only some groups are kept."""

    MAX = "max"  # the best expert
    TOP_2_SUM = "top_2_sum"  # the two best experts together


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule that picks K of E experts for a token.

    Attributes:
        scoring: logits to scores.
        top_k: K.
        renormalize: divide the chosen scores by their sum. Meaningless with TOP_K_SOFTMAX, whose weights sum to 1.
        num_groups, kept_groups: experts lie in ``num_groups`` groups of neighbours; only the ``kept_groups`` best
            groups are chosen from. 1 and 1: no groups.
        group_score: what groups are ranked by.
        scaling: factor on the final weights.
        epsilon: added to the sum that ``renormalize`` divides by.
    """

    scoring: Scoring
    top_k: int
    renormalize: bool = False
    num_groups: int = 1
    kept_groups: int = 1
    group_score: GroupScore = GroupScore.MAX
    scaling: float = 1.0
    epsilon: float = 0.0


class ActivationKind(StrEnum):
    """The gated activation between the two matrices of an expert."""

    SILU = "silu"  # silu(gate) * up
    GELU_TANH = "gelu_tanh"  # gelu(gate, tanh approximation) * up
    CLAMPED_SWIGLU = "clamped_swiglu"  # (up + 1) * gate * sigmoid(alpha * gate), both clamped first


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """The gated activation and where its two halves lie in the first product.

    Attributes:
        kind: the function.
        interleaved: rows of w13 alternate gate, up, gate, up, ...; else the first I rows are the gate.
        alpha, limit: of CLAMPED_SWIGLU: gate <= limit, -limit <= up <= limit.
    """

    kind: ActivationKind = ActivationKind.SILU
    interleaved: bool = False
    alpha: float = 1.702
    limit: float = 7.0


SILU = ExpertActivation()
"""The activation of most models: silu(first half) * second half."""


@dataclass(frozen=True, slots=True)
class AlignedTokens:
    """Token-expert pairs sorted by expert, each expert's run padded to whole blocks.

    Attributes:
        sorted_pairs: int32[>= num_padded], pairs (index into the ids [T * K]) by expert; padding holds T * K.
        block_experts: int32[>= num_padded / block], the expert of each block; -1: ids outside the experts.
        num_padded: int32[1], entries of ``sorted_pairs`` in use; what lies behind them is undefined.
    """

    sorted_pairs: Tensor
    block_experts: Tensor
    num_padded: Tensor


class PackedExperts(Protocol):
    """The experts of one layer, prepared for this device."""

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Run every token through its experts and add up the weighted results.

        x [T, H]; topk_ids int32[T, K], -1 or an expert held elsewhere contributes nothing; topk_weights float32[T, K].
        Returns a new [T, H] of x.dtype.
        """


class MoEOperations(Protocol):
    """Mixture-of-experts operations of one device."""

    def route(self, logits: Tensor, routing: Routing, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts.

        logits [T, E] of any floating type; correction_bias float32[E] is added to the scores to choose by, not to
        the weights. Returns (topk_ids int32[T, K], topk_weights float32[T, K]), best expert first, ties to the lower
        index.
        """

    def align(self, topk_ids: Tensor, num_experts: int, block_size: int) -> AlignedTokens:
        """Sort token-expert pairs by expert and pad each expert's run to a multiple of ``block_size``.

        topk_ids int32[T, K]; ids outside 0..num_experts-1 are gathered in blocks of expert -1 before all others.
        """

    def grouped_gemm(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """Rows offsets[e]..offsets[e+1] of x times weight[e]^T: x [M, K], weight [E, N, K], int32[E + 1] -> [M, N]."""

    def pack_experts(
        self,
        w13: Tensor,
        w2: Tensor,
        *,
        activation: ExpertActivation = SILU,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        first_expert: int = 0,
        total_experts: int | None = None,
    ) -> PackedExperts:
        """Take over the weights of the experts ``first_expert``.. of a layer; the caller drops its references.

        w13 [E, 2I, H], w2 [E, H, I], w13_bias [E, 2I], w2_bias [E, H]. ``total_experts``: how many there are on all
        ranks, E when None. Ids given to the result count from 0 over all ranks.
        """

    def fused_experts(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w13: Tensor,
        w2: Tensor,
        *,
        activation: ExpertActivation = SILU,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
    ) -> Tensor:
        """``pack_experts`` and the call in one, for weights used once. Same shapes; returns [T, H]."""
