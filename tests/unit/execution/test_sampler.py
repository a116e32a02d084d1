"""The sampler: every parameter, and independence of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_lite.execution.random_numbers import exponentials
from sglang_lite.execution.sampler import CANDIDATES, Sampler, lowest_argmax
from tests.support.step_plans import sampling_columns

VOCAB = 1000
NO_TOKENS: dict[int, np.ndarray[Any, np.dtype[np.int32]]] = {}


def sample(
    logits: Tensor, *, sampler: Sampler | None = None, generated: int | list[int] = 0, **options: Any
) -> list[int]:
    """Sample one token for each row of ``logits`` [S, V]."""
    suppressed, resumed = options.pop("suppressed", {}), options.pop("resumed", NO_TOKENS)
    count = logits.shape[0]
    sampler = sampler or Sampler(logits.shape[1], torch.device("cpu"), seed=1)
    tokens = sampler.sample(
        logits.clone(),
        sampling_columns(count, **options),
        np.arange(count, dtype=np.int32),
        np.broadcast_to(np.asarray(generated, dtype=np.int32), count),
        suppressed,
        resumed,
    )
    return [int(token) for token in tokens]


def frequencies(row: Tensor, draws: int = 4000, **options: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Share of each token over many draws under one seed and rising positions."""
    tokens = sample(row.expand(draws, -1), generated=list(range(draws)), seed=11, **options)
    return np.bincount(tokens, minlength=row.shape[-1]) / draws


def random_logits(rows: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 2


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.zeros(2, 10)
    logits[0, [3, 7]] = 5.0
    assert sample(logits) == [3, 0]
    assert sample(logits, temperature=1.0, top_k=1) == [3, 0]
    assert lowest_argmax(logits).tolist() == [3, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_not_finite_give_no_token(value: float, temperature: float) -> None:
    logits = random_logits(3)
    logits[1, 400] = value
    tokens = sample(logits, temperature=temperature, seed=3)
    assert tokens[1] == -1
    assert tokens[0] >= 0 and tokens[2] >= 0


def test_temperature_shapes_the_distribution() -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        expected = (row / temperature).softmax(-1).numpy()
        np.testing.assert_allclose(frequencies(row, temperature=temperature), expected, atol=0.03)


def test_filters_keep_what_they_promise() -> None:
    row = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert (frequencies(row, temperature=1.0, top_k=2)[2:] == 0).all()
    # A token is kept while the probability before it is below top_p.
    assert (frequencies(row, temperature=1.0, top_p=0.5)[1:] == 0).all()
    assert (frequencies(row, temperature=1.0, top_p=0.51)[:2] > 0).all()
    assert (frequencies(row, temperature=1.0, top_p=0.51)[2:] == 0).all()
    assert (frequencies(row, temperature=1.0, min_p=0.4)[:2] > 0).all()
    assert (frequencies(row, temperature=1.0, min_p=0.4)[2:] == 0).all()
    np.testing.assert_allclose(frequencies(row, temperature=1.0, top_k=2)[:2], [2 / 3, 1 / 3], atol=0.03)


def test_filters_wider_than_the_candidates_sort_the_whole_row() -> None:
    row = torch.zeros(3 * CANDIDATES)
    row[: CANDIDATES + 50] = 1.0
    kept = frequencies(row, temperature=1.0, top_k=CANDIDATES + 50)
    assert (kept[CANDIDATES + 50 :] == 0).all()
    assert np.count_nonzero(kept) > CANDIDATES
    wide = frequencies(torch.zeros(3 * CANDIDATES), temperature=1.0, top_p=0.9)
    assert np.count_nonzero(wide) > 2 * CANDIDATES


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.02}, {"top_k": 400, "top_p": 0.99}],
    ids=["plain", "top_k", "top_p", "min_p", "whole row"],
)
def test_a_seed_gives_the_same_token_in_any_batch(options: dict[str, Any]) -> None:
    logits = random_logits(8)
    alone = [sample(logits[i : i + 1], temperature=1.0, seed=5 + i, generated=7, **options)[0] for i in range(8)]
    together = sample(logits, temperature=1.0, seed=[5 + i for i in range(8)], generated=7, **options)
    mixed = sample(
        logits,
        temperature=[1.0, 0.0] * 4,
        seed=[5 + i for i in range(8)],
        generated=7,
        **{name: [value, {"top_k": -1, "top_p": 1.0, "min_p": 0.0}[name]] * 4 for name, value in options.items()},
    )
    assert together == alone
    assert mixed[::2] == alone[::2]
    assert mixed[1::2] == lowest_argmax(logits)[1::2].tolist()


@pytest.mark.parametrize("options", [{}, {"top_k": 2000}], ids=["plain", "filtered"])
def test_a_seeded_draw_survives_the_rounding_of_another_batch(options: dict[str, Any]) -> None:
    """The same request in another batch has logits that differ in their last bits."""
    draws, vocab = 600, 8000
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 3
    noise = torch.randn(draws, vocab, generator=torch.Generator().manual_seed(4)) * 5e-5
    counters = list(range(draws))
    one = sample(row.expand(draws, -1), temperature=1.0, seed=9, generated=counters, **options)
    other = sample(row + noise, temperature=1.0, seed=9, generated=counters, **options)
    assert sum(a != b for a, b in zip(one, other, strict=True)) <= 1


def test_draws_depend_on_seed_position_and_token() -> None:
    counters, ids = np.arange(2000, dtype=np.int32), np.arange(3, dtype=np.int64)[None]
    first = exponentials(np.full(2000, 1, dtype=np.int64), counters, ids)
    second = exponentials(np.full(2000, 2, dtype=np.int64), counters, ids)
    assert first.shape == (2000, 3) and first.min() > 0
    assert np.isfinite(first).all() and abs(first.mean() - 1) < 0.05 and abs(first.std() - 1) < 0.05
    assert len(np.unique(np.concatenate([first, second]))) == 12000
    for left, right in ((first[1:, 0], first[:-1, 0]), (first[:, 0], first[:, 1]), (first[:, 0], second[:, 0])):
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.1


def test_rows_without_a_seed_differ_from_each_other_and_repeat_with_the_server_seed() -> None:
    row = torch.zeros(VOCAB)
    tokens = sample(row.expand(50, -1), temperature=1.0)
    assert len(set(tokens)) > 40
    assert tokens == sample(row.expand(50, -1), temperature=1.0)


def test_penalties_count_output_tokens_only() -> None:
    logits = torch.tensor([[5.6554, 4.5243, 3.3932, -2.0]])
    sampler = Sampler(4, torch.device("cpu"))

    def step(**penalty: float) -> int:
        return sample(logits, sampler=sampler, **penalty)[0]

    # Each step starts where the one before left: the counts belong to the row.
    assert [step(presence_penalty=2.0) for _ in range(3)] == [0, 1, 0]
    fresh: dict[int, Any] = {0: np.empty(0, dtype=np.int32)}
    assert sample(logits, sampler=sampler, resumed=fresh, frequency_penalty=0.7) == [0]
    assert [step(frequency_penalty=0.7) for _ in range(3)] == [0, 1, 0]
    assert sample(logits, sampler=sampler, resumed={0: np.array([0, 0], dtype=np.int32)}, repetition_penalty=2.0) == [1]


def test_penalties_touch_only_their_rows() -> None:
    logits = random_logits(3)
    sampler = Sampler(VOCAB, torch.device("cpu"))
    best = lowest_argmax(logits).tolist()
    resumed = {1: np.array([best[1]], dtype=np.int32)}
    tokens = sample(logits, sampler=sampler, resumed=resumed, presence_penalty=[0.0, 50.0, 0.0])
    assert tokens[0] == best[0] and tokens[2] == best[2] and tokens[1] != best[1]


def test_repetition_penalty_multiplies_negative_logits() -> None:
    logits = torch.tensor([[-1.0, -1.5, -9.0]])
    seen = {0: np.array([0], dtype=np.int32)}
    assert sample(logits, resumed=seen, repetition_penalty=2.0) == [1]


def test_bias_and_suppressed_tokens() -> None:
    logits = torch.tensor([[5.6554, 4.5243, 3.3932], [5.6554, 4.5243, 3.3932]])
    assert sample(logits, logit_bias={1: {1: 2.0}}) == [0, 1]
    assert sample(logits, suppressed={0: (0, 1)}) == [2, 0]
