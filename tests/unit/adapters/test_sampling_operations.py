"""Filters and draws of both implementations against their definitions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.cpu.sampling import CpuSampling
from sglang_lite.adapters.cuda.sampling import CudaSampling
from sglang_lite.adapters.cuda.wheels import load_wheels
from sglang_lite.adapters.sampling import DRAW_STRIDE, SamplingOperations
from tests.support.kernel_doubles import installed_kernels


@pytest.fixture(params=["cpu", "cuda"])
def sampling(request: pytest.FixtureRequest) -> Iterator[SamplingOperations]:
    if request.param == "cpu":
        yield CpuSampling()
        return
    with installed_kernels():
        yield CudaSampling(load_wheels(), enable_pdl=False)


def probabilities(rows: int = 5, vocab: int = 50) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)


def test_softmax(sampling: SamplingOperations) -> None:
    logits, temperature = torch.randn(3, 20), torch.tensor([0.5, 1.0, 3.0])
    expected = torch.stack([(row / t).softmax(-1) for row, t in zip(logits, temperature, strict=True)])
    torch.testing.assert_close(sampling.softmax(logits, temperature), expected)


def test_top_k(sampling: SamplingOperations) -> None:
    given = probabilities()
    top_k = torch.tensor([1, 3, 10, 50, 50], dtype=torch.int32)
    kept = sampling.keep_top_k(given, top_k)
    for row, count in enumerate(top_k.tolist()):
        best = given[row].argsort(descending=True)[:count]
        assert set(kept[row].nonzero().flatten().tolist()) == set(best.tolist())
    torch.testing.assert_close(kept.sum(-1), torch.ones(5))
    torch.testing.assert_close(kept[4], given[4])


def test_top_p(sampling: SamplingOperations) -> None:
    given = probabilities()
    top_p = torch.tensor([0.01, 0.3, 0.7, 0.95, 1.0])
    kept = sampling.keep_top_p(given, top_p)
    for row, share in enumerate(top_p.tolist()):
        order = given[row].argsort(descending=True).tolist()
        total, expected = 0.0, set()
        for token in order:
            if total >= share:
                break
            expected.add(token)
            total += float(given[row, token])
        assert set(kept[row].nonzero().flatten().tolist()) == expected
    torch.testing.assert_close(kept.sum(-1), torch.ones(5))


def test_draws_follow_the_probabilities(sampling: SamplingOperations) -> None:
    given = torch.tensor([[0.5, 0.0, 0.3, 0.2]]).repeat(4000, 1)
    drawn = sampling.draw(given, 7, DRAW_STRIDE)
    assert drawn.dtype == torch.int32
    shares = torch.bincount(drawn.long(), minlength=4) / 4000
    assert shares[1] == 0
    torch.testing.assert_close(shares, given[0], atol=0.03, rtol=0)
    assert torch.equal(sampling.draw(given, 7, DRAW_STRIDE), drawn)
    assert not torch.equal(sampling.draw(given, 7, 2 * DRAW_STRIDE), drawn)
