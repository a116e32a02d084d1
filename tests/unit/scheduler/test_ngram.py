"""Drafts from n-grams against a search that looks at every position."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_lite.scheduler import ngram
from sglang_lite.scheduler.ngram import SIZES, NgramIndex
from sglang_lite.scheduler.table import RequestTable


def rows(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def naive(tokens: list[int], count: int) -> list[int] | None:
    for size in SIZES:
        suffix = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) > size and tokens[end - size : end] == suffix:
                period = len(tokens) - end
                return [tokens[end + index % period] for index in range(count)]
    return None


@pytest.mark.parametrize("vocabulary", [2, 5, 40])
def test_the_last_earlier_occurrence_is_continued(vocabulary: int) -> None:
    generator = np.random.default_rng(vocabulary)
    table = RequestTable(3, 8192, 16)
    index = NgramIndex(table)
    looked, missed = 0, 0
    texts = [generator.integers(0, vocabulary, 200).tolist() for _ in range(3)]
    lengths = [1, 5, 40]
    for row, text in enumerate(texts):
        table.token_ids[row, : len(text)] = text
    while max(lengths) < 190:
        index.extend(rows(0, 1, 2), rows(*lengths))
        has_draft, drafts = index.draft(rows(0, 1, 2), rows(*lengths), 6)
        for row, text in enumerate(texts):
            expected = naive(text[: lengths[row]], 6)
            looked += 1
            missed += (drafts[row].tolist() if has_draft[row] else None) != expected
        lengths = [length + int(step) for length, step in zip(lengths, generator.integers(1, 4, 3), strict=True)]
    # Two n-grams in one slot of the table: the older one is forgotten.
    assert missed <= 0.02 * looked


def test_a_period_goes_on() -> None:
    table = RequestTable(1, 64, 16)
    table.token_ids[0, :7] = [9, 1, 2, 3, 1, 2, 3]
    index = NgramIndex(table)
    index.extend(rows(0), rows(7))
    has_draft, drafts = index.draft(rows(0), rows(7), 8)
    assert has_draft.tolist() == [True]
    assert drafts[0].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


def test_collisions_and_earlier_owners_of_a_row_draft_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_MOST_SLOTS", 16)
    generator = np.random.default_rng(3)
    table = RequestTable(1, 512, 16)
    index = NgramIndex(table)
    for _ in range(4):
        text = generator.integers(0, 6, 400)
        table.token_ids[0, :400] = text
        index.restart(rows(0))
        for length in range(10, 400, 7):
            index.extend(rows(0), rows(length))
            end = int(index.find(rows(0), rows(length))[0])
            if end:
                known = text[:length].tolist()
                assert end < length
                assert known[end - 2 : end] == known[-2:]
