"""Which keys sparse attention keeps: the best, and of equal ones the first, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.cpu.key_selection import selection_mask


def kept(scores: list[list[float]], top_k: int, *, lengths: list[int] | None = None) -> list[list[int]]:
    """Keys that queries keep whose one index head finds exactly these scores (none below 0)."""
    wanted = torch.tensor(scores)
    count = wanted.shape[1]
    visible = torch.arange(count) < torch.tensor(lengths or [count] * len(scores)).unsqueeze(1)
    query, weights = torch.ones(len(scores), 1, 1, 1), torch.ones(len(scores), 1, 1)
    mask: Tensor = selection_mask(query, weights, wanted.unsqueeze(2), visible.unsqueeze(1), top_k)
    return [torch.nonzero(row == 0).flatten().tolist() for row in mask[:, 0]]


def test_the_best_keys_are_kept() -> None:
    assert kept([[0.5, 3.0, 1.0, 2.0], [4.0, 3.0, 2.0, 1.0]], 2) == [[1, 3], [0, 1]]
    assert kept([[0.5, 3.0, 1.0, 9.0]], 2, lengths=[3]) == [[1, 2]]
    assert kept([[0.5, 3.0, 1.0, 9.0]], 3, lengths=[2]) == [[0, 1]]


@pytest.mark.parametrize("padding", [0, 1, 7, 40, 300])
@pytest.mark.parametrize("others", [0, 1, 5])
def test_of_equal_keys_the_first_are_kept(padding: int, others: int) -> None:
    """Index heads that find nothing give a key exactly 0, which is common to many keys."""
    row = [0.0] * 60 + [1.0, 0.0, 2.0] + [0.0] * 17
    length = len(row)
    scores = [row + [5.0] * padding] + [[1.0] * (length + padding)] * others
    found = kept(scores, 12, lengths=[length] + [length + padding] * others)
    assert found[0] == [*range(10), 60, 62]
    assert found[1:] == [list(range(12))] * others
