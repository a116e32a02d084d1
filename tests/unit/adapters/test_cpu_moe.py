"""Routing, alignment and experts on the host, against one loop a token written from the formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cpu.moe import CpuMoE
from sglang_lite.adapters.moe import SILU, ActivationKind, ExpertActivation, GroupScore, Routing, Scoring
from sglang_lite.adapters.moe_reference import plain_experts, route
from tests.support.kernel_doubles.capture import Recording

moe = CpuMoE()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TestRoute:
    def test_softmax_of_all_experts(self) -> None:
        logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
        ids, weights = moe.route(logits, Routing(Scoring.SOFTMAX, 2))
        total = sum(torch.tensor([1.0, 3.0, 2.0, -1.0]).exp()).item()
        assert ids.tolist() == [[1, 2]] and ids.dtype == torch.int32
        assert weights[0].tolist() == pytest.approx([torch.e**3 / total, torch.e**2 / total], rel=1e-6)

    def test_softmax_renormalized_equals_softmax_of_the_top(self) -> None:
        logits = random(7, 16)
        first = moe.route(logits, Routing(Scoring.SOFTMAX, 4, renormalize=True))
        second = moe.route(logits, Routing(Scoring.TOP_K_SOFTMAX, 4))
        assert torch.equal(first[0], second[0])
        torch.testing.assert_close(first[1], second[1])

    def test_bias_decides_the_choice_and_not_the_weight(self) -> None:
        logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
        bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
        ids, weights = moe.route(logits, Routing(Scoring.SIGMOID, 2), bias)
        assert ids.tolist() == [[3, 0]]
        torch.testing.assert_close(weights, logits[:, [3, 0]].sigmoid())

    def test_sigmoid_groups_scaling_and_sum(self) -> None:
        # Two best of each group of three: 0.9 + 0.1, 0.6 + 0.5, 0.4 + 0.3; the group with the single best loses.
        scores = torch.tensor([[0.9, 0.1, 0.05, 0.6, 0.5, 0.1, 0.4, 0.3, 0.2]])
        routing = Routing(
            Scoring.SIGMOID,
            2,
            renormalize=True,
            num_groups=3,
            kept_groups=1,
            group_score=GroupScore.TOP_2_SUM,
            scaling=2.5,
            epsilon=1e-20,
        )
        ids, weights = moe.route(scores.logit(), routing, torch.zeros(9))
        assert ids.tolist() == [[3, 4]]
        assert weights[0].tolist() == pytest.approx([2.5 * 0.6 / 1.1, 2.5 * 0.5 / 1.1], rel=1e-5)

    def test_softmax_groups_ranked_by_their_best(self) -> None:
        logits = torch.tensor([[5.0, -9.0, 1.0, 0.9, 4.0, 3.9]])
        routing = Routing(Scoring.SOFTMAX, 3, num_groups=3, kept_groups=2, scaling=16.0)
        ids, weights = moe.route(logits, routing)
        assert ids.tolist() == [[0, 4, 5]]
        torch.testing.assert_close(weights, logits.softmax(-1)[:, [0, 4, 5]] * 16.0)

    def test_negative_choices_of_a_kept_group_beat_every_dropped_group(self) -> None:
        logits = torch.tensor([[3.0, 2.0, 0.0, -1.0]])
        bias = torch.tensor([-0.2, -9.0, -5.0, -5.0])
        routing = Routing(Scoring.SIGMOID, 2, num_groups=2, kept_groups=1, group_score=GroupScore.MAX)
        assert moe.route(logits, routing, bias)[0].tolist() == [[0, 1]]

    def test_equal_scores_go_to_the_lower_index(self) -> None:
        assert moe.route(torch.zeros(3, 64), Routing(Scoring.SOFTMAX, 4))[0].tolist() == [[0, 1, 2, 3]] * 3

    @pytest.mark.parametrize("scoring", [Scoring.SOFTMAX, Scoring.SIGMOID, Scoring.TOP_K_SOFTMAX])
    def test_selection_and_sorting_choose_the_same(self, scoring: Scoring) -> None:
        logits = (random(200, 16) * 2).round() / 2  # many ties, some within the best and some at their end
        routing = Routing(scoring, 4, num_groups=1 if scoring is Scoring.TOP_K_SOFTMAX else 4, kept_groups=1)
        routing = replace(routing, kept_groups=min(2, routing.num_groups))
        chosen, sorted_out = moe.route(logits, routing), route(logits, routing)
        assert torch.equal(chosen[0], sorted_out[0]) and torch.equal(chosen[1], sorted_out[1])

    def test_half_precision_logits_are_scored_in_float32(self) -> None:
        logits = random(4, 8).bfloat16()
        _, weights = moe.route(logits, Routing(Scoring.SOFTMAX, 2))
        torch.testing.assert_close(weights, logits.float().softmax(-1).topk(2).values)

    @pytest.mark.parametrize(
        ("routing", "message"),
        [
            (Routing(Scoring.SOFTMAX, 9), "between 1 and the 8"),
            (Routing(Scoring.SOFTMAX, 2, num_groups=3), "3 equal groups"),
            (Routing(Scoring.SOFTMAX, 2, num_groups=2, kept_groups=3), "kept_groups"),
            (Routing(Scoring.SOFTMAX, 5, num_groups=2, kept_groups=1), "between 1 and the 4"),
            (Routing(Scoring.SIGMOID, 1, num_groups=8, kept_groups=1, group_score=GroupScore.TOP_2_SUM), "two experts"),
        ],
    )
    def test_impossible_rules_are_refused(self, routing: Routing, message: str) -> None:
        with pytest.raises(OperationInputError, match=message):
            moe.route(torch.zeros(1, 8), routing)


class TestAlign:
    def test_runs_are_padded_to_blocks(self) -> None:
        aligned = moe.align(torch.tensor([[2, 0], [2, 1], [2, 2]], dtype=torch.int32), 4, 3)
        assert aligned.sorted_pairs.tolist() == [1, 6, 6, 3, 6, 6, 0, 2, 4, 5, 6, 6]
        assert aligned.block_experts.tolist() == [0, 1, 2, 2]
        assert aligned.num_padded.tolist() == [12]

    def test_ids_of_no_expert_come_first(self) -> None:
        aligned = moe.align(torch.tensor([[1, -1], [7, 0]], dtype=torch.int32), 2, 2)
        assert aligned.sorted_pairs.tolist() == [1, 2, 3, 4, 0, 4]
        assert aligned.block_experts.tolist() == [-1, 0, 1]


class TestGroupedGemm:
    def test_each_run_uses_its_own_matrix(self) -> None:
        x, weight = random(6, 5), random(4, 3, 5, seed=1)
        out = moe.grouped_gemm(x, weight, torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32))
        for row, expert in enumerate([0, 0, 2, 2, 2, 3]):
            torch.testing.assert_close(out[row], weight[expert] @ x[row])

    @pytest.mark.parametrize("offsets", [[0, 6], [0, 1, 2, 3, 5], [1, 2, 3, 4, 6]])
    def test_bounds_must_cover_the_rows(self, offsets: list[int]) -> None:
        with pytest.raises(OperationInputError, match="row bounds"):
            moe.grouped_gemm(random(6, 5), random(4, 3, 5), torch.tensor(offsets, dtype=torch.int32))


def one_expert(x: Tensor, w13: Tensor, w2: Tensor, b13: Tensor, b2: Tensor, activation: ExpertActivation) -> Tensor:
    """One token through one expert, from the formulas."""
    both = w13 @ x + b13
    half = both.numel() // 2
    gate = torch.stack([both[2 * i] if activation.interleaved else both[i] for i in range(half)])
    up = torch.stack([both[2 * i + 1] if activation.interleaved else both[half + i] for i in range(half)])
    if activation.kind is ActivationKind.SILU:
        hidden = gate / (1 + (-gate).exp()) * up
    elif activation.kind is ActivationKind.GELU_TANH:
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        hidden = 0.5 * gate * (1 + inner.tanh()) * up
    else:
        gate = torch.minimum(gate, torch.tensor(activation.limit))
        up = torch.maximum(torch.minimum(up, torch.tensor(activation.limit)), torch.tensor(-activation.limit))
        hidden = (up + 1) * gate / (1 + (-activation.alpha * gate).exp())
    return w2 @ hidden + b2


class TestExperts:
    @pytest.mark.parametrize("num_tokens", [1, 3, 40])
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("kind", list(ActivationKind))
    def test_equals_one_token_at_a_time(self, kind: ActivationKind, interleaved: bool, num_tokens: int) -> None:
        activation = ExpertActivation(kind, interleaved, limit=1.0)
        w13, w2 = random(6, 10, 8, seed=1), random(6, 8, 5, seed=2)
        b13, b2 = random(6, 10, seed=3), random(6, 8, seed=4)
        x = random(num_tokens, 8, seed=5)
        ids, weights = moe.route(random(num_tokens, 6, seed=6), Routing(Scoring.SOFTMAX, 2))
        out = moe.fused_experts(x, ids, weights, w13, w2, activation=activation, w13_bias=b13, w2_bias=b2)
        for token in range(num_tokens):
            expected = sum(
                weights[token, k] * one_expert(x[token], w13[e], w2[e], b13[e], b2[e], activation)
                for k, e in enumerate(ids[token].tolist())
            )
            torch.testing.assert_close(out[token], expected, rtol=1e-5, atol=1e-5)

    def test_shards_of_the_experts_add_up_to_the_whole(self) -> None:
        w13, w2, x = random(6, 10, 8, seed=1), random(6, 8, 5, seed=2), random(9, 8, seed=5)
        ids, weights = moe.route(random(9, 6, seed=6), Routing(Scoring.SOFTMAX, 3))
        parts = [
            moe.pack_experts(w13[a:b], w2[a:b], first_expert=a, total_experts=6)(x, ids, weights)
            for a, b in [(0, 2), (2, 6)]
        ]
        torch.testing.assert_close(parts[0] + parts[1], moe.fused_experts(x, ids, weights, w13, w2))

    def test_filtered_ids_contribute_nothing(self) -> None:
        w13, w2, x = random(6, 10, 8, seed=1), random(6, 8, 5, seed=2), random(2, 8, seed=5)
        ids = torch.tensor([[-1, 2], [-1, -1]], dtype=torch.int32)
        out = moe.fused_experts(x, ids, torch.ones(2, 2), w13, w2)
        torch.testing.assert_close(out[0], moe.fused_experts(x, ids[:, 1:], torch.ones(2, 1), w13, w2)[0])
        assert not out[1].any()

    def test_nothing_is_asked_of_the_device_while_a_graph_is_captured(self) -> None:
        """A look at a value would raise inside the recording; the replay sees other tokens choose other experts."""
        w13, w2, x = random(6, 10, 8, seed=1), random(6, 8, 5, seed=2), random(9, 8, seed=5)
        b13, b2 = random(6, 10, seed=3), random(6, 8, seed=4)
        ids, weights = moe.route(random(9, 6, seed=6), Routing(Scoring.SOFTMAX, 3))
        capturing = plain_experts(w13[2:], w2[2:], SILU, b13[2:], b2[2:], 2, is_capturing=lambda: True)
        with Recording() as recording:
            out = capturing(x, ids, weights)
        whole = moe.pack_experts(w13[2:], w2[2:], w13_bias=b13[2:], w2_bias=b2[2:], first_expert=2, total_experts=6)
        torch.testing.assert_close(out, whole(x, ids, weights))
        ids.copy_(moe.route(random(9, 6, seed=7), Routing(Scoring.SOFTMAX, 3))[0])
        x.copy_(random(9, 8, seed=8))
        recording.replay()
        torch.testing.assert_close(out, whole(x, ids, weights))

    def test_the_type_of_the_tokens_is_kept(self) -> None:
        w13, w2 = random(2, 10, 8, seed=1).bfloat16(), random(2, 8, 5, seed=2).bfloat16()
        out = moe.fused_experts(random(3, 8).bfloat16(), torch.zeros(3, 1).int(), torch.ones(3, 1), w13, w2)
        assert out.dtype == torch.bfloat16

    def test_no_tokens(self) -> None:
        out = moe.fused_experts(
            torch.empty(0, 8), torch.empty(0, 2).int(), torch.empty(0, 2), random(2, 10, 8), random(2, 8, 5)
        )
        assert out.shape == (0, 8)

    def test_shapes_that_do_not_fit_are_named(self) -> None:
        with pytest.raises(OperationInputError, match=r"w2 must have shape \[2, 8, 5\]"):
            moe.pack_experts(random(2, 10, 8), random(2, 5, 8))
        with pytest.raises(OperationInputError, match="w13_bias"):
            moe.pack_experts(random(2, 10, 8), random(2, 8, 5), w13_bias=random(2, 5))
        with pytest.raises(OperationInputError, match="do not lie among the 3"):
            moe.pack_experts(random(2, 10, 8), random(2, 8, 5), first_expert=2, total_experts=3)
