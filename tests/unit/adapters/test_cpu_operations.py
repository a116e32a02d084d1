"""Norms, rotation, activation, copies and linear layers on the host against the plain reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.adapters.cpu.linear import (
    CpuLinear,
    Layout,
    agrees_with_torch,
    available_layouts,
    choose_layout,
)
from tests.support.reference_operations import ReferenceOperations

TYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
TOKENS = pytest.mark.parametrize("tokens", [1, 5, 40])


@pytest.fixture(scope="module")
def ops() -> CpuOperations:
    return CpuOperations(measure=False)


@TYPES
@TOKENS
def test_norms(ops: CpuOperations, tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    x, residual, weight = (
        torch.randn(tokens, 48).to(dtype),
        torch.randn(tokens, 48).to(dtype),
        torch.randn(48).to(dtype),
    )
    reference = ReferenceOperations()
    expected = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), expected, atol=tolerance, rtol=tolerance)
    expected_sum = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    actual_sum = ops.add_rms_norm(x, residual.clone(), weight, 1e-6)
    torch.testing.assert_close(actual_sum, expected_sum, atol=tolerance, rtol=tolerance)
    heads = torch.randn(tokens, 3, 16).to(dtype)
    head_weight = torch.randn(16).to(dtype)
    torch.testing.assert_close(
        ops.rms_norm(heads, head_weight, 1e-6),
        reference.rms_norm(heads, head_weight, 1e-6),
        atol=tolerance,
        rtol=tolerance,
    )


@TYPES
@TOKENS
@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("pairing", ["rotary_neox", "rotary_interleaved"])
def test_rotation(
    ops: CpuOperations, tokens: int, dtype: torch.dtype, tolerance: float, rotary_dim: int, merged: bool, pairing: str
) -> None:
    query, key, _ = torch.randn(tokens, 6, 16).to(dtype).split([3, 1, 2], 1)
    if not merged:
        query, key = query.clone(), key.clone()
    angles = torch.randn(tokens, rotary_dim // 2)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    cos, sin = table[:, : rotary_dim // 2], table[:, rotary_dim // 2 :]
    expected = getattr(ReferenceOperations(), pairing)(query.clone(), key.clone(), cos, sin)
    actual = getattr(ops, pairing)(query, key, cos, sin)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_rotation_of_another_step_uses_its_own_angles(ops: CpuOperations) -> None:
    for _ in range(3):
        query, key = torch.randn(2, 4, 8).split([3, 1], 1)
        cos, sin = torch.randn(2, 4), torch.randn(2, 4)
        expected = ReferenceOperations().rotary_neox(query.clone(), key.clone(), cos, sin)
        torch.testing.assert_close(ops.rotary_neox(query, key, cos, sin), expected)


@TYPES
def test_activation_embedding_and_page_copies(ops: CpuOperations, dtype: torch.dtype, tolerance: float) -> None:
    gate_up = torch.randn(5, 24).to(dtype)
    expected = ReferenceOperations().silu_and_mul(gate_up)
    torch.testing.assert_close(ops.silu_and_mul(gate_up), expected, atol=tolerance, rtol=tolerance)
    weight = torch.randn(10, 4).to(dtype)
    assert torch.equal(ops.embedding(torch.tensor([3, 0, 3]), weight), weight[[3, 0, 3]])
    pool = torch.randn(6, 2, 2, 4, 1, 8).to(dtype)
    expected_pool = pool.clone()
    expected_pool[[5, 0]] = pool[[1, 2]]
    ops.copy_pages(pool, torch.tensor([1, 2]), torch.tensor([5, 0]))
    assert torch.equal(pool, expected_pool)


@TYPES
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_layout_gives_the_same_product(dtype: torch.dtype, tolerance: float, has_bias: bool) -> None:
    weight, bias = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype) if has_bias else None
    layouts = available_layouts(dtype, shared=False)
    assert len(layouts) >= 2
    for layout, rows in itertools.product(layouts, (1, 3, 16, 70)):
        x = torch.randn(rows, 64).to(dtype)
        expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        linear = CpuLinear(weight.clone(), bias, layout)
        assert (linear.in_features, linear.out_features) == (64, 96)
        # bfloat16 rounds to 8 bits of sums of size up to about 30
        scale = 1 if dtype == torch.float32 else 8
        torch.testing.assert_close(linear(x).float(), expected, atol=tolerance * scale * 8, rtol=tolerance)
        assert linear(x.view(1, rows, 64)).shape == (1, rows, 96)


@pytest.mark.parametrize("shared", [False, True])
def test_measured_choice_computes_the_product(shared: bool) -> None:
    ops = CpuOperations()
    weight = torch.randn(512, 256)
    linear = ops.pack_linear(weight, None, shared=shared)
    for rows in (1, 20, 100):
        x = torch.randn(rows, 256)
        torch.testing.assert_close(linear(x), x @ weight.T, atol=1e-4, rtol=1e-4)


def test_a_shared_weight_is_left_as_it_is() -> None:
    weight = torch.randn(512, 256)
    before = weight.clone()
    linear = CpuOperations().pack_linear(weight, None, shared=True)
    linear(torch.randn(2, 256))
    assert torch.equal(weight, before)


def test_a_packing_that_depends_on_the_row_count_is_not_considered() -> None:
    weight = torch.randn(96, 64)
    for layout in available_layouts(torch.float32, shared=False):
        assert agrees_with_torch(layout, weight)

    def wrong_for_many(x: Tensor, held: Tensor, bias: Tensor | None) -> Tensor:
        return x @ held.T if len(x) < 100 else torch.zeros(len(x), len(held))

    assert not agrees_with_torch(Layout("packed", lambda held: held, wrong_for_many), weight)


def test_layout_is_chosen_over_all_row_counts() -> None:
    layouts = available_layouts(torch.float32, shared=False)[:2]
    # The second layout wins at one row count and loses more at another.
    assert choose_layout(layouts, [[2.0, 1.0], [1.0, 4.0]]) is layouts[0]
    assert choose_layout(layouts, [[2.0, 1.0], [1.0, 1.2]]) is layouts[1]
    # A saving within the noise changes nothing.
    assert choose_layout(layouts, [[1.0, 0.98], [1.0, 0.97]]) is layouts[0]
