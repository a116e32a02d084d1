"""Adapted products against one token at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.cpu.lora import CpuAdapters
from sglang_lite.adapters.cuda.lora import MaskedAdapters
from sglang_lite.adapters.lora import NO_ADAPTER, AdapterOperations

SLOTS, RANK, IN, OUT = 4, 3, 10, 7

each_implementation = pytest.mark.parametrize("ops", [CpuAdapters(), MaskedAdapters(torch.device("cpu"))])


def tensors(num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, OUT), (num_tokens, IN), (SLOTS, RANK, IN), (SLOTS, RANK, OUT)]
    output, x, a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    return output, x, a, b


def expected(output: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: list[int]) -> Tensor:
    rows = []
    for row, token, slot in zip(output, x, slots, strict=True):
        rows.append(row if slot == NO_ADAPTER else row + b[slot].T @ (a[slot] @ token))
    return torch.stack(rows)


@each_implementation
@pytest.mark.parametrize(
    "slots",
    [
        [2, 2, 2],
        [0, 1, 2, 3],
        [3, NO_ADAPTER, 0, 3, NO_ADAPTER, 0, 1],
        [NO_ADAPTER, 2],
        [1],
        [3, 3, 3, NO_ADAPTER, NO_ADAPTER],
    ],
)
def test_products(ops: AdapterOperations, slots: list[int]) -> None:
    output, x, a, b = tensors(len(slots))
    want = expected(output, x, a, b, slots)
    batch = ops.plan(np.array(slots, np.int32))
    assert batch is not None
    ops.add_product(output, x, a, b, batch)
    torch.testing.assert_close(output, want)


@each_implementation
def test_a_step_without_adapters_needs_no_products(ops: AdapterOperations) -> None:
    assert ops.plan(np.full(5, NO_ADAPTER, np.int32)) is None


@each_implementation
def test_an_adapter_with_huge_values_disturbs_no_other_token(ops: AdapterOperations) -> None:
    output, x, a, b = tensors(3)
    a[1] = 1e38
    b[1] = 1e38
    want = expected(output, x, a, b, [0, NO_ADAPTER, 2])
    batch = ops.plan(np.array([0, NO_ADAPTER, 2], np.int32))
    assert batch is not None
    ops.add_product(output, x, a, b, batch)
    torch.testing.assert_close(output, want)
