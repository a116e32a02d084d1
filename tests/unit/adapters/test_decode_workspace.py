"""Bookkeeping of the decode workspace: who is where, what it costs, when memory is given back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.adapters.cpu.decode_slab import capacity_for
from sglang_lite.adapters.cpu.decode_workspace import NOWHERE, DecodeWorkspace, Load, Placement
from sglang_lite.adapters.cpu.shared_prefix import find_shared

GEOMETRY = KVGeometry(4096, 16, 2, 1, 8, torch.float32)
SLOT_BYTES = 64 * GEOMETRY.bytes_per_token


def step(workspace: DecodeWorkspace, rows: list[int], lengths: list[int], shared_pages: int = 0) -> Placement:
    """One decode step of rows whose pages are their own, but for ``shared_pages`` at the start."""
    width = max(-(-length // 16) for length in lengths)
    table = np.array([[100 * row + page for page in range(width)] for row in rows], dtype=np.int64)
    table[:, :shared_pages] = np.arange(3000, 3000 + shared_pages)
    stops = np.array(lengths, dtype=np.int64)
    return workspace.place(np.array(rows, dtype=np.int32), stops - 1, stops, table)


def test_capacities_rise_by_a_third_or_a_half() -> None:
    assert [capacity_for(n) for n in (1, 64, 65, 97, 129, 193, 300, 1025)] == [64, 64, 96, 128, 192, 256, 384, 1536]


def test_a_sequence_is_read_once() -> None:
    workspace = DecodeWorkspace(GEOMETRY, 1 << 20)
    placement = step(workspace, [3, 5], [40, 21])
    assert [(load.slot, load.num_tokens) for load in placement.loads] == [(0, 39), (1, 20)]
    assert [list(load.pages) for load in placement.loads] == [[300, 301, 302], [500, 501]]
    for grown in range(1, 8):
        placement = step(workspace, [5, 3], [21 + grown, 40 + grown])
        assert placement.loads == [] and placement.slot_of.tolist() == [1, 0]


def test_a_length_that_does_not_follow_is_read_again() -> None:
    workspace = DecodeWorkspace(GEOMETRY, 1 << 20)
    step(workspace, [0], [40])
    assert step(workspace, [0], [42]).loads and not step(workspace, [0], [43]).loads
    workspace.forget(np.array([0], dtype=np.int32))
    assert step(workspace, [0], [44]).loads


def test_tokens_that_were_taken_back_are_written_again_in_place() -> None:
    workspace = DecodeWorkspace(GEOMETRY, 1 << 20)
    for length in (40, 44, 42, 43, 41):
        step(workspace, [0], [length])
    assert not step(workspace, [0], [41]).loads


def test_a_sequence_moves_when_it_outgrows_its_slot() -> None:
    workspace = DecodeWorkspace(GEOMETRY, 1 << 20)
    capacities = []
    for length in range(40, 120):
        placement = step(workspace, [0], [length])
        capacities.append(placement.slabs[0].capacity)
    assert sorted(set(capacities)) == [64, 96, 128]
    assert np.count_nonzero(np.diff(capacities)) == 2


def test_memory_stays_within_the_budget() -> None:
    workspace = DecodeWorkspace(GEOMETRY, 6 * SLOT_BYTES)
    placement = step(workspace, list(range(10)), [20] * 10)
    assert (placement.slab_of != NOWHERE).sum() == 6
    assert workspace.num_bytes <= 6 * SLOT_BYTES
    for _ in range(40):  # the first six leave; the others find room
        placement = step(workspace, [6, 7, 8, 9], [20] * 4)
    assert (placement.slab_of != NOWHERE).all()


def test_rows_that_found_no_memory_are_not_looked_at_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = DecodeWorkspace(GEOMETRY, 2 * SLOT_BYTES)
    looked_at: list[int] = []
    enter = DecodeWorkspace._enter

    def noting(self: DecodeWorkspace, row: int, *rest: Any) -> Load | None:
        looked_at.append(row)
        return enter(self, row, *rest)

    monkeypatch.setattr(DecodeWorkspace, "_enter", noting)
    for length in range(20, 40):
        placement = step(workspace, list(range(50)), [length] * 50)
        assert (placement.slab_of != NOWHERE).sum() == 2
    assert looked_at == list(range(50))
    workspace.forget(np.array([7], dtype=np.int32))  # another sequence
    step(workspace, list(range(50)), [40] * 50)
    assert looked_at == [*range(50), 7]


def test_gaps_are_closed() -> None:
    workspace = DecodeWorkspace(GEOMETRY, 1 << 24)
    step(workspace, list(range(40)), [20] * 40)
    placement = step(workspace, [38, 39], [21, 21])
    assert sorted(placement.slot_of.tolist()) == [0, 1]
    assert len(placement.loads) == 2


def test_a_shared_prefix_is_kept_once() -> None:
    workspace = DecodeWorkspace(GEOMETRY, 1 << 24)
    alone = step(workspace, [0], [1040], shared_pages=64)
    assert alone.prefixes == [] and alone.base_of.tolist() == [0]
    both = step(workspace, [0, 1], [1041, 1050], shared_pages=64)
    ((prefix, places),) = both.prefixes
    assert prefix.num_tokens == 1024 and places.tolist() == [0, 1]
    assert both.base_of.tolist() == [1024, 1024]
    assert [load.num_tokens for load in both.loads] == [16, 25]
    third = step(workspace, [0, 1, 2], [1042, 1051, 1030], shared_pages=64)
    assert [len(load.pages) for load in third.loads] == [1]
    assert third.prefixes[0][1].tolist() == [0, 1, 2]
    before = workspace.num_bytes
    for length in range(20):
        step(workspace, [9], [20 + length])
    workspace.forget(np.array([9], dtype=np.int32))
    step(workspace, [9], [50])
    assert not workspace._prefixes and workspace.num_bytes < before


def test_a_prefix_whose_page_is_written_anew_is_dropped() -> None:
    workspace = DecodeWorkspace(GEOMETRY, 1 << 24)
    step(workspace, [0, 1, 2], [1040, 1050, 40], shared_pages=64)
    assert len(workspace._prefixes) == 1
    workspace.drop_rewritten(np.array([200, 2999, 3064]))
    assert len(workspace._prefixes) == 1
    workspace.drop_rewritten(np.array([5, 3063]))
    assert not workspace._prefixes and not workspace._in_prefix.any()
    assert [len(load.pages) for load in step(workspace, [0, 1, 2], [1041, 1051, 41], shared_pages=0).loads] == [65, 66]


@pytest.mark.parametrize(
    ("common_pages", "expected"),
    [
        ([64, 64, 64], (64, [0, 1, 2, 3])),
        ([64, 10, 10], (64, [0, 1])),  # 64 pages for one other row save more than 10 for three
        ([2, 2, 2], None),
        ([20, 0, 0], None),  # too little is saved
        ([0, 0, 0], None),
    ],
)
def test_the_prefix_that_saves_most(common_pages: list[int], expected: tuple[int, list[int]] | None) -> None:
    table = np.arange(4 * 70, dtype=np.int64).reshape(4, 70) + 1
    for row, pages in enumerate(common_pages, start=1):
        table[row, :pages] = table[0, :pages]
    found = find_shared(table, np.full(4, 66), 0, 16)
    assert (None if found is None else (found[0], found[1].tolist())) == expected
