"""Page metadata against a loop over rows and tokens, and where it lies in its arena."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cuda.arena import SECTION_ALIGNMENT, StepArena, arena_of
from sglang_lite.adapters.cuda.paging import HostBatch, PagedStep, arena_length, page_step

HOST = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn) -> tuple[HostBatch, int]:
    """Decode rows, then chunks, over strided page tables with rubbish past the rows' ends; sometimes padded."""
    page_size = draw(st.sampled_from([1, 3, 16]))
    num_decode = draw(st.integers(0, 4))
    chunks = draw(st.lists(st.integers(1, 9), min_size=0 if num_decode else 1, max_size=3))
    query_lens = np.array([1] * num_decode + chunks, dtype=np.int32)
    cached = draw(st.lists(st.integers(0, 40), min_size=len(query_lens), max_size=len(query_lens)))
    kv_lens = query_lens + np.array(cached, dtype=np.int32)
    width = int(-(-kv_lens.max() // page_size)) + draw(st.integers(0, 2))
    table = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 1000, (len(kv_lens), 2 * width), dtype=np.int32)
    padding = draw(st.integers(0, 3)) if not chunks else 0
    return HostBatch(
        num_decode, query_lens, kv_lens, table[:, :width], len(kv_lens) + padding, scratch_page=5000
    ), page_size


def expected(batch: HostBatch, page_size: int) -> dict[str, list[int]]:
    """Row by row, token by token."""
    found: dict[str, list[int]] = {
        name: [] for name in ("batch_indices", "positions", "kv_indices", "last_page_len", "kv_lens")
    }
    found["qo_indptr"], found["kv_indptr"] = [0], [0]
    for row in range(batch.num_rows):
        real = row < len(batch.kv_lens)
        length, queries = (int(batch.kv_lens[row]), int(batch.query_lens[row])) if real else (1, 1)
        pages = batch.page_table[row, : -(-length // page_size)].tolist() if real else [5000]
        found["kv_indices"] += pages
        found["last_page_len"].append(length - (len(pages) - 1) * page_size)
        found["kv_lens"].append(length)
        found["batch_indices"] += [row] * queries
        found["positions"] += range(length - queries, length)
        found["qo_indptr"].append(found["qo_indptr"][-1] + queries)
        found["kv_indptr"].append(found["kv_indptr"][-1] + len(pages))
    return found


@given(batches())
@settings(max_examples=80, deadline=None)
def test_equals_a_loop(case: tuple[HostBatch, int]) -> None:
    batch, page_size = case
    arena = arena_of(arena_length(batch, page_size), HOST)
    step = page_step(batch, page_size, arena)
    arena.upload()
    for name, values in expected(batch, page_size).items():
        section = getattr(step, name)
        assert section.array.tolist() == section.host.tolist() == section.device.tolist() == values, name
        assert section.device.storage_offset() % SECTION_ALIGNMENT == 0
    assert (step.num_rows, step.num_tokens) == (batch.num_rows, len(expected(batch, page_size)["positions"]))
    assert step.num_decode == batch.num_decode + batch.num_rows - len(batch.kv_lens)


def test_captured_sections_stay_where_they_are() -> None:
    """Other lengths, other numbers of pages and of padding rows: a graph of 4 rows finds its inputs."""
    arena = arena_of(256, HOST)

    def offsets(kv_lens: list[int]) -> list[int]:
        arena.rewind()
        lengths = np.array(kv_lens, dtype=np.int32)
        table = np.zeros((len(kv_lens), 8), dtype=np.int32)
        batch = HostBatch(len(kv_lens), np.ones_like(lengths), lengths, table, padded_rows=4, reserved_pages=20)
        step = page_step(batch, 4, arena)
        return [section.device.data_ptr() for section in _sections(step)]

    assert offsets([1]) == offsets([30, 2, 17]) == offsets([9, 9, 9, 9])


def _sections(step: PagedStep) -> list:  # type: ignore[type-arg]
    return [
        step.qo_indptr,
        step.kv_indptr,
        step.last_page_len,
        step.kv_lens,
        step.batch_indices,
        step.positions,
        step.kv_indices,
    ]


def test_padding_is_for_decode_steps() -> None:
    batch = HostBatch(
        1, np.array([1, 3], np.int32), np.array([4, 3], np.int32), np.zeros((2, 2), np.int32), padded_rows=4
    )
    with pytest.raises(OperationInputError, match="1 of 2 rows are decode rows"):
        page_step(batch, 4, arena_of(128, HOST))


def test_arena_limits() -> None:
    arena = arena_of(10, HOST)
    assert arena.reserve(3).device.storage_offset() == 0 and arena.reserve(2).device.storage_offset() == 4
    with pytest.raises(OperationInputError, match="11 integers are needed and 10 fit"):
        arena.reserve(3)
    with pytest.raises(OperationInputError, match=r"int32 of one length"):
        StepArena(torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32))


def test_an_arena_goes_on_in_another_host_buffer() -> None:
    first, second, device = (torch.zeros(8, dtype=torch.int32) for _ in range(3))
    arena = StepArena(first, device)
    arena.reserve(2).array[:] = 7
    arena.rewind(second)
    arena.reserve(3).array[:] = 9
    arena.upload()
    assert first.tolist()[:3] == [7, 7, 0] and second.tolist()[:3] == device.tolist()[:3] == [9, 9, 9]
