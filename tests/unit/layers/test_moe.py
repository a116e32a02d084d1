"""The experts' block: what it adds up, and how often ranks communicate."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_lite.adapters.moe import Routing, Scoring
from sglang_lite.layers.moe import SparseMLP
from sglang_lite.layers.parallel import SingleRank
from tests.support.reference_operations import ReferenceLinear, ReferenceOperations

HIDDEN, EXPERTS, WIDTH, TOKENS = 8, 6, 4, 5
ROUTING = Routing(Scoring.SOFTMAX, top_k=2, renormalize=True)


@dataclass
class Pair(SingleRank):
    """A group of two whose other rank would have added ``other``."""

    other: Tensor
    sums: list[Tensor] = field(default_factory=list)

    @property
    def size(self) -> int:
        return 2

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.sums.append(tensor.clone())
        return tensor.add_(self.other)


def linear(out: int, inputs: int, seed: int) -> ReferenceLinear:
    return ReferenceLinear(torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed)), None)


def block(**options: object) -> tuple[SparseMLP, Tensor, Tensor]:
    """A block with fixed weights, an input, and the routed part of its output, computed with every expert."""
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator)
    w2 = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    router, ops = linear(EXPERTS, HIDDEN, 1), ReferenceOperations()
    gate, up = torch.einsum("eih,th->tei", w13, x).chunk(2, -1)
    each = torch.einsum("ehi,tei->teh", w2, torch.nn.functional.silu(gate) * up)
    probabilities = router(x).softmax(-1)
    top = probabilities.topk(2)
    weights = torch.zeros_like(probabilities).scatter(1, top.indices, top.values / top.values.sum(-1, keepdim=True))
    routed = torch.einsum("te,teh->th", weights, each)
    experts = ops.moe.pack_experts(w13, w2)
    return SparseMLP(ops, router, ROUTING, experts, **options), x, routed  # type: ignore[arg-type]


def test_routed_experts_alone() -> None:
    mlp, x, routed = block()
    torch.testing.assert_close(mlp(x), routed)


def test_shared_experts_are_added() -> None:
    shared = linear(HIDDEN, HIDDEN, 2)
    mlp, x, routed = block(shared=shared)
    torch.testing.assert_close(mlp(x), routed + shared(x))


def test_a_gate_scales_the_shared_experts_by_token() -> None:
    shared, gate = linear(HIDDEN, HIDDEN, 2), linear(1, HIDDEN, 3)
    mlp, x, routed = block(shared=shared, shared_gate=gate)
    torch.testing.assert_close(mlp(x), routed + torch.sigmoid(gate(x)) * shared(x))


def test_a_correction_bias_changes_the_choice_and_not_the_weights() -> None:
    bias = torch.zeros(EXPERTS)
    bias[4] = 10.0
    mlp, x, routed = block(correction_bias=bias)
    ids, weights = ReferenceOperations().moe.route(linear(EXPERTS, HIDDEN, 1)(x), ROUTING, bias)
    assert (ids == 4).any(-1).all()
    assert float(weights.max()) <= 1.0
    assert not torch.allclose(mlp(x), routed)


def test_ranks_add_up_routed_and_shared_experts_in_one_go() -> None:
    shared, other = linear(HIDDEN, HIDDEN, 2), torch.full((TOKENS, HIDDEN), 0.5)
    group = Pair(other)
    mlp, x, routed = block(shared=shared, group=group)
    output = mlp(x)
    torch.testing.assert_close(output, routed + shared(x) + other)
    assert len(group.sums) == 1
