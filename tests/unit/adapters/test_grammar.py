"""Grammar masks on the host and over the kernel's double."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cpu.grammar import CpuGrammar
from sglang_lite.adapters.cuda.grammar import CudaGrammar
from sglang_lite.adapters.cuda.wheels import load_wheels
from sglang_lite.adapters.grammar import GrammarOperations, bitmask_width
from tests.support.kernel_doubles.families import installed_families


@pytest.fixture(params=["host", "sglang-kernel", "sgl-kernel"])
def ops(request: pytest.FixtureRequest) -> Iterator[GrammarOperations]:
    if request.param == "host":
        yield CpuGrammar()
    else:
        with installed_families(request.param):
            yield CudaGrammar(load_wheels())


def bits(*rows: set[int], vocab_size: int) -> Tensor:
    """One token at a time."""
    words = [[0] * bitmask_width(vocab_size) for _ in rows]
    for row, allowed in enumerate(rows):
        for token in allowed:
            words[row][token // 32] |= 1 << token % 32
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [31, 32, 33, 70])
def test_only_allowed_tokens_keep_their_logits(ops: GrammarOperations, vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(2, vocab_size).to(dtype)
    allowed = [{0, 30}, {vocab_size - 1, 7}]
    masked = logits.clone()
    ops.apply_bitmask(masked, bits(*allowed, vocab_size=vocab_size))
    for row in range(2):
        for token in range(vocab_size):
            expected = float(logits[row, token]) if token in allowed[row] else float("-inf")
            assert float(masked[row, token]) == expected


def test_some_rows(ops: GrammarOperations) -> None:
    logits = torch.randn(4, 40)
    masked = logits.clone()
    ops.apply_bitmask(masked, bits({0}, {33}, {1}, {3}, vocab_size=40), torch.tensor([3, 1], dtype=torch.int32))
    assert torch.equal(masked[[0, 2]], logits[[0, 2]])
    assert masked[3].isfinite().nonzero().flatten().tolist() == [3]
    assert masked[1].isfinite().nonzero().flatten().tolist() == [33]


def test_masks_that_do_not_fit_are_refused(ops: GrammarOperations) -> None:
    logits = torch.randn(2, 40)
    with pytest.raises(OperationInputError, match=r"int32 \[2, 2\]"):
        ops.apply_bitmask(logits, torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(OperationInputError, match=r"int32 \[2, 2\]"):
        ops.apply_bitmask(logits, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(OperationInputError, match="int32 vector"):
        ops.apply_bitmask(logits, torch.zeros(2, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
