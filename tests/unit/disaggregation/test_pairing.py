"""Which ranks exchange what: every decode rank gets each of its heads once, and every prefill rank is asked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.disaggregation.pairing import Heads, PairingError, heads_of, num_decode_ranks, prefill_ranks
from sglang_lite.disaggregation.pool_memory import HeadLayout, PoolMemory

POWERS = st.sampled_from([1, 2, 4, 8, 16])


@given(POWERS, POWERS, POWERS)
def test_every_head_comes_once_and_every_rank_is_asked_as_often_as_it_waits_for(
    prefill_size: int, decode_size: int, total: int
) -> None:
    asked = [0] * prefill_size
    for decode_rank in range(decode_size):
        own = heads_of(total, decode_size, decode_rank)
        seen: list[int] = []
        for source in prefill_ranks(prefill_size, decode_size, decode_rank, total):
            asked[source.rank] += 1
            common = own.common(heads_of(total, prefill_size, source.rank))
            assert common.count
            if source.sends:
                seen += range(common.first, common.first + common.count)
        assert seen == list(range(own.first, own.first + own.count))
    assert asked == [num_decode_ranks(prefill_size, decode_size)] * prefill_size


@given(POWERS, POWERS)
def test_of_ranks_that_hold_the_same_row_one_sends(prefill_size: int, decode_size: int) -> None:
    for decode_rank in range(decode_size):
        sources = prefill_ranks(prefill_size, decode_size, decode_rank, 0)
        assert [source.sends for source in sources] == [True] + [False] * (len(sources) - 1)


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(2, 3), (3, 2), (0, 1), (1, 0)])
def test_sizes_that_fit_no_ranks_are_refused(prefill_size: int, decode_size: int) -> None:
    with pytest.raises(PairingError, match="size"):
        num_decode_ranks(prefill_size, decode_size)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PairingError, match="6 key/value heads cannot be split over 4 ranks"):
        heads_of(6, 4, 0)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 8), st.tuples(POWERS, POWERS, POWERS))
def test_spans_copy_the_common_heads_of_pages(
    width: int, num_rows: int, num_pages: int, sizes: tuple[int, int, int]
) -> None:
    """What spans and checksums see is what slices of arrays [pages, rows, heads, width] are."""
    total, here, there = sizes
    numbers = np.random.default_rng(0)
    whole = numbers.integers(1, 255, (num_pages, num_rows, total, width), dtype=np.uint8)
    order = numbers.permutation(num_pages).astype(np.int32)
    for rank in range(here):
        own = heads_of(total, here, rank)
        source = np.ascontiguousarray(whole[:, :, own.first : own.first + own.count])
        memory = _memory(source, total, own)
        for other in range(there):
            theirs = heads_of(total, there, other)
            common = own.common(theirs)
            if not common.count:
                with pytest.raises(PairingError):
                    memory.share_with(other, there)
                continue
            share = memory.share_with(other, there)
            target = np.zeros((num_pages, num_rows, theirs.count, width), dtype=np.uint8)
            spans = memory.spans(np.arange(num_pages, dtype=np.int32), order, share)
            flat, out = source.reshape(-1), target.reshape(-1)
            for src, dst, length in zip(spans.src_offset, spans.dst_offset, spans.length, strict=True):
                out[dst : dst + length] = flat[src : src + length]
            expected = np.zeros_like(target)
            at = slice(common.first - theirs.first, common.first - theirs.first + common.count)
            expected[order, :, at] = whole[:, :, common.first : common.first + common.count]
            assert (target == expected).all()
            back = _memory(target, total, theirs)
            reverse = back.share_with(rank, here)
            for page in range(num_pages):
                assert bytes(memory.part(page, share)) == bytes(back.part(int(order[page]), reverse))
            if own == theirs:
                assert len(spans) == num_pages


def _memory(pool: np.ndarray, total: int, own: Heads) -> PoolMemory:
    num_pages, num_rows, heads, width = pool.shape
    layout = HeadLayout(total, own, width)
    page_bytes = num_rows * heads * width
    return PoolMemory(pool.ctypes.data, num_pages, page_bytes, 4, "uint8", "test", heads=layout)
