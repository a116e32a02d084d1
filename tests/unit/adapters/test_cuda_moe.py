"""Mixture-of-experts operations over the wheels' doubles against the host's, for both kernel lines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cpu.moe import CpuMoE
from sglang_lite.adapters.cuda.moe import CudaMoE
from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.cuda.wheels import load_wheels
from sglang_lite.adapters.dispatch import Target
from sglang_lite.adapters.moe import ActivationKind, ExpertActivation, GroupScore, Routing, Scoring
from sglang_lite.types import StartupError
from tests.support.kernel_doubles.experts import HalfOrder
from tests.support.kernel_doubles.families import Calls, installed_families

REFERENCE = CpuMoE()
LINES = ("sglang-kernel", "sgl-kernel")


@pytest.fixture(params=LINES)
def line(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def calls(line: str) -> Iterator[Calls]:
    with installed_families(line) as made:
        yield made


def operations(line: str, sm: int = 90, *, has_flashinfer: bool = True) -> CudaMoE:
    return CudaMoE(load_wheels(), Selection(Target(sm, line, has_flashinfer), enable_pdl=sm >= 90))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


GROUPED = Routing(
    Scoring.SIGMOID,
    4,
    renormalize=True,
    num_groups=4,
    kept_groups=2,
    group_score=GroupScore.TOP_2_SUM,
    scaling=2.5,
    epsilon=1e-20,
)
RULES = {
    "softmax": (Routing(Scoring.SOFTMAX, 3), False, "sgl_kernel.topk_softmax"),
    "renormalized": (Routing(Scoring.SOFTMAX, 3, renormalize=True, scaling=0.5), False, "sgl_kernel.topk_softmax"),
    "top_k_softmax": (Routing(Scoring.TOP_K_SOFTMAX, 3), False, "sgl_kernel.topk_softmax"),
    "sigmoid": (Routing(Scoring.SIGMOID, 3, scaling=1.5), False, "sgl_kernel.topk_sigmoid"),
    "sigmoid_bias": (Routing(Scoring.SIGMOID, 3, renormalize=True), True, "sgl_kernel.topk_sigmoid"),
    "grouped": (GROUPED, True, "flashinfer.fused_moe.fused_topk_deepseek"),
    "softmax_groups": (Routing(Scoring.SOFTMAX, 3, num_groups=4, kept_groups=2, scaling=16.0), False, None),
}


class TestRoute:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("rule", RULES)
    def test_every_rule_equals_the_host(self, line: str, calls: Calls, rule: str, dtype: torch.dtype) -> None:
        routing, has_bias, kernel = RULES[rule]
        logits = random(9, 16).to(dtype)
        bias = random(16, seed=1) * 0.3 if has_bias else None
        ops = operations(line)
        ids, weights = ops.route(logits, routing, bias)
        expected_ids, expected_weights = REFERENCE.route(logits, routing, bias)
        assert torch.equal(ids, expected_ids) and ids.dtype == torch.int32
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
        assert list(calls) == ([kernel] if kernel else [])
        ops.route(logits, routing, bias)  # the choice of a kernel is made once

    def test_grouped_rule_without_flashinfer(self, line: str, calls: Calls) -> None:
        logits, bias = random(9, 16), random(16, seed=1)
        ids, weights = operations(line, has_flashinfer=False).route(logits, GROUPED, bias)
        expected_ids, expected_weights = REFERENCE.route(logits, GROUPED, bias)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights)
        assert list(calls) == (["sgl_kernel.moe_fused_gate"] if line == "sgl-kernel" else [])

    @pytest.mark.parametrize(
        ("num_experts", "routing"),
        [
            (66, Routing(Scoring.SIGMOID, 2, True, 2, 1, GroupScore.TOP_2_SUM)),  # 33 experts a group
            (16, Routing(Scoring.SIGMOID, 2, False, 2, 1, GroupScore.TOP_2_SUM)),  # not renormalized
            (16, Routing(Scoring.SIGMOID, 2, True, 2, 1, GroupScore.MAX)),
            (32, Routing(Scoring.SIGMOID, 9, True, 2, 1, GroupScore.TOP_2_SUM)),
        ],
    )
    def test_beyond_the_limits_of_the_kernels(
        self, line: str, calls: Calls, num_experts: int, routing: Routing
    ) -> None:
        logits, bias = random(5, num_experts), random(num_experts, seed=1)
        ids, weights = operations(line).route(logits, routing, bias)
        expected_ids, expected_weights = REFERENCE.route(logits, routing, bias)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights)
        assert set(calls) <= {"sgl_kernel.moe_fused_gate"}

    def test_strided_logits(self, line: str, calls: Calls) -> None:
        logits = random(9, 32)[:, ::2]
        routing = Routing(Scoring.SOFTMAX, 2)
        assert torch.equal(operations(line).route(logits, routing)[0], REFERENCE.route(logits, routing)[0])


class TestAlign:
    @pytest.mark.parametrize("num_tokens", [1, 2, 17])
    @pytest.mark.parametrize("block_size", [1, 4, 16])
    def test_equals_the_host(self, line: str, calls: Calls, num_tokens: int, block_size: int) -> None:
        ids = torch.randint(-1, 9, (num_tokens, 3), generator=torch.Generator().manual_seed(0)).int()
        aligned, expected = operations(line).align(ids, 8, block_size), REFERENCE.align(ids, 8, block_size)
        used = int(expected.num_padded)
        assert int(aligned.num_padded) == used
        assert torch.equal(aligned.sorted_pairs[:used], expected.sorted_pairs)
        assert torch.equal(aligned.block_experts[: used // block_size], expected.block_experts)


class TestExperts:
    @pytest.fixture(params=[False, True], autouse=True)
    def half_order(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel's order of halves is found out, whichever it is."""
        monkeypatch.setattr(HalfOrder, "gate_first", request.param)

    @pytest.mark.parametrize("biased", [False, True])
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("kind", list(ActivationKind))
    def test_equals_the_host(
        self, line: str, calls: Calls, kind: ActivationKind, interleaved: bool, biased: bool
    ) -> None:
        activation = ExpertActivation(kind, interleaved)
        w13, w2 = random(4, 32, 24, seed=1).bfloat16() / 3, random(4, 24, 16, seed=2).bfloat16() / 3
        b13, b2 = (random(4, 32, seed=3).bfloat16(), random(4, 24, seed=4).bfloat16()) if biased else (None, None)
        x = random(7, 24, seed=5).bfloat16()
        ids, weights = REFERENCE.route(random(7, 4, seed=6), Routing(Scoring.SOFTMAX, 2))
        given = {"activation": activation, "w13_bias": b13, "w2_bias": b2}
        packed = operations(line).pack_experts(w13, w2, **given)
        expected = REFERENCE.fused_experts(
            x.float(),
            ids,
            weights,
            w13.float(),
            w2.float(),
            activation=activation,
            w13_bias=None if b13 is None else b13.float(),
            w2_bias=None if b2 is None else b2.float(),
        )
        torch.testing.assert_close(packed(x, ids, weights).float(), expected, rtol=2e-2, atol=2e-2)
        assert len(calls["flashinfer.fused_moe.cutlass_fused_moe"]) == 2  # the question of the halves, and the call

    def test_parts_of_the_experts_add_up(self, line: str, calls: Calls) -> None:
        w13, w2 = random(4, 32, 24, seed=1).bfloat16(), random(4, 24, 16, seed=2).bfloat16()
        x = random(7, 24, seed=5).bfloat16()
        ids, weights = REFERENCE.route(random(7, 4, seed=6), Routing(Scoring.SOFTMAX, 2))
        ids[0, 0] = -1
        ops = operations(line)
        parts = [
            ops.pack_experts(w13[a : a + 2], w2[a : a + 2], first_expert=a, total_experts=4)(x, ids, weights).float()
            for a in (0, 2)
        ]
        expected = REFERENCE.fused_experts(x.float(), ids, weights, w13.float(), w2.float())
        torch.testing.assert_close(parts[0] + parts[1], expected, rtol=3e-2, atol=5e-1)

    def test_no_tokens(self, line: str, calls: Calls) -> None:
        packed = operations(line).pack_experts(random(2, 32, 24).bfloat16(), random(2, 24, 16).bfloat16())
        out = packed(torch.empty(0, 24).bfloat16(), torch.empty(0, 2).int(), torch.empty(0, 2))
        assert out.shape == (0, 24)

    def test_what_the_kernel_does_not_take_is_refused(self, line: str, calls: Calls) -> None:
        ops = operations(line)
        with pytest.raises(OperationInputError, match="divisible by 8"):
            ops.pack_experts(random(2, 24, 12).bfloat16(), random(2, 12, 12).bfloat16())
        with pytest.raises(OperationInputError, match="no such part of 5"):
            ops.pack_experts(
                random(2, 32, 24).bfloat16(), random(2, 24, 16).bfloat16(), first_expert=2, total_experts=5
            )

    def test_the_loop_serves_devices_without_the_kernel(self, line: str, calls: Calls) -> None:
        w13, w2 = random(4, 32, 24, seed=1).bfloat16(), random(4, 24, 16, seed=2).bfloat16()
        x = random(7, 24, seed=5).bfloat16()
        ids, weights = REFERENCE.route(random(7, 4, seed=6), Routing(Scoring.SOFTMAX, 2))
        out = operations(line, sm=80).fused_experts(x, ids, weights, w13, w2)
        assert torch.equal(out, REFERENCE.fused_experts(x, ids, weights, w13, w2))
        assert not calls


def test_a_kernel_with_wrong_results_is_refused(line: str) -> None:
    def broken(**arguments: object) -> object:
        output = arguments["output"]
        assert isinstance(output, Tensor)
        return output.zero_()

    with (
        installed_families(line, {"flashinfer.fused_moe.cutlass_fused_moe": broken}),
        pytest.raises(StartupError, match="known answer"),
    ):
        operations(line).pack_experts(random(2, 32, 24).bfloat16(), random(2, 24, 16).bfloat16())


def test_grouped_products(line: str, calls: Calls) -> None:
    x, weight = random(6, 16).bfloat16(), random(4, 8, 16, seed=1).bfloat16()
    offsets = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32)
    out = operations(line).grouped_gemm(x, weight, offsets)
    torch.testing.assert_close(out, REFERENCE.grouped_gemm(x, weight, offsets), rtol=2e-2, atol=2e-2)
    with pytest.raises(OperationInputError, match="int32 offsets"):
        operations(line).grouped_gemm(x, weight, offsets.long())
