"""Offsets of the page-major KV pool: the golden table, asymmetric pairs and everything that is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from sglang_lite.cache.layout import (
    KEY,
    VALUE,
    KVCoordinateError,
    KVDtypeError,
    KVLayoutError,
    KVPageLayout,
    KVStorageError,
    kv_dtype_bytes,
    packed_latent_token_bytes,
    pages_for_slots,
)

GOLDEN = KVPageLayout.for_heads(page_size=4, num_layers=2, num_kv_heads=2, head_dim=8, element_bytes=2)
LATENT = KVPageLayout.for_latent(page_size=4, num_layers=2, kv_lora_rank=2, rope_dim=2, element_bytes=4)


def test_golden_sizes() -> None:
    assert GOLDEN.bytes_per_token == 128
    assert GOLDEN.page_bytes == 512
    assert GOLDEN.layer_page_bytes == 256
    assert GOLDEN.tensor_page_bytes(KEY) == GOLDEN.tensor_page_bytes(VALUE) == 128
    GOLDEN.check_storage(1536, 3)
    assert pages_for_slots(12, 4) == 3


def test_golden_offsets() -> None:
    assert GOLDEN.page_span(1, num_pages=3) == (512, 1024)
    assert GOLDEN.offset(1, 1, VALUE, 3, num_pages=3) == 992
    assert GOLDEN.span(7, 1, VALUE, num_pages=3) == (992, 1024)


def test_float32_offset() -> None:
    layout = KVPageLayout.for_heads(page_size=4, num_layers=2, num_kv_heads=2, head_dim=8, element_bytes=4)
    assert layout.page_bytes == 1024
    assert layout.offset(3, 1, VALUE, 2) == 3968


def test_asymmetric_pair() -> None:
    assert LATENT.tensor_token_bytes == (16, 8)
    assert LATENT.layer_page_bytes == 4 * 24
    assert LATENT.offset(0, 0, KEY, 3) == 48
    assert LATENT.offset(0, 0, VALUE, 0) == 4 * 16
    assert LATENT.offset(1, 1, VALUE, 2) == 4 * 48 + 4 * 24 + 4 * 16 + 2 * 8
    assert LATENT.span(6, 1, VALUE) == (368, 376)


@pytest.mark.parametrize("layout", [GOLDEN, LATENT, KVPageLayout(3, 2, (10,))])
def test_rows_tile_the_pool(layout: KVPageLayout) -> None:
    num_pages = 3
    spans = sorted(
        layout.span(slot, layer, tensor, num_pages=num_pages)
        for slot, layer, tensor in itertools.product(
            range(num_pages * layout.page_size), range(layout.num_layers), range(len(layout.tensor_token_bytes))
        )
    )
    assert spans[0][0] == 0
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] == num_pages * layout.page_bytes


def test_offset_matches_a_numpy_view() -> None:
    pool = np.arange(3 * GOLDEN.page_bytes, dtype=np.int64).reshape(3, 2, 2, 4, 32)
    for page, layer, tensor, token in itertools.product(range(3), range(2), range(2), range(4)):
        assert GOLDEN.offset(page, layer, tensor, token) == pool[page, layer, tensor, token, 0]


TOTALS: dict[str, Any] = {"page_size": 4, "page_bytes": 512, "bytes_per_token": 128, "num_layers": 2}


def test_totals_give_the_same_layout() -> None:
    assert KVPageLayout.from_totals(**TOTALS) == GOLDEN
    assert KVPageLayout.from_totals(**TOTALS, pair=(40, 24)).tensor_token_bytes == (40, 24)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"page_size": 0}, "page_size is 0"),
        ({"page_bytes": 0}, "page_bytes is 0"),
        ({"bytes_per_token": 0}, "bytes_per_token is 0"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_tensors": 0}, "num_tensors is 0"),
        ({"page_bytes": 513}, "513"),
        ({"num_layers": 3}, "3 layers"),
        ({"num_layers": 64, "num_tensors": 4}, "4 tensors"),
        ({"num_tensors": 4}, "4 tensors"),
        ({"pair": (40, 25)}, "40 and 25"),
        ({"pair": (64, 0)}, "tensor_token_bytes"),
    ],
)
def test_contradicting_totals_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(KVLayoutError, match=named):
        KVPageLayout.from_totals(**(TOTALS | change))


@pytest.mark.parametrize("fields", [(0, 2, (8, 8)), (4, 0, (8, 8)), (4, 2, (0, 8)), (4, 2, ()), (4, 2, (8, 8, 8))])
def test_zero_fields_are_refused(fields: tuple[int, int, tuple[int, ...]]) -> None:
    with pytest.raises(KVLayoutError):
        KVPageLayout(*fields)


@pytest.mark.parametrize(
    ("coordinates", "named"),
    [
        ((3, 0, 0, 0), "page is 3"),
        ((-1, 0, 0, 0), "page is -1"),
        ((0, 2, 0, 0), "layer is 2"),
        ((0, -1, 0, 0), "layer is -1"),
        ((0, 0, 2, 0), "tensor is 2"),
        ((0, 0, 0, 4), "token is 4"),
        ((0, 0, 0, -1), "token is -1"),
    ],
)
def test_coordinates_out_of_range(coordinates: tuple[int, int, int, int], named: str) -> None:
    with pytest.raises(KVCoordinateError, match=named):
        GOLDEN.offset(*coordinates, num_pages=3)


def test_slot_and_page_out_of_range() -> None:
    with pytest.raises(KVCoordinateError, match="slot is 12"):
        GOLDEN.span(12, 0, KEY, num_pages=3)
    with pytest.raises(KVCoordinateError, match="page is 3"):
        GOLDEN.page_span(3, num_pages=3)


def test_slot_mapping() -> None:
    GOLDEN.check_slot_mapping(np.array([0, 11], dtype=np.int64), 3)
    with pytest.raises(KVCoordinateError, match="empty"):
        GOLDEN.check_slot_mapping(np.empty(0, dtype=np.int64), 3)
    with pytest.raises(KVCoordinateError, match="slot 12 at batch index 2"):
        GOLDEN.check_slot_mapping(np.array([0, 11, 12], dtype=np.int64), 3)
    with pytest.raises(KVCoordinateError, match="slot -1 at batch index 0"):
        GOLDEN.check_slot_mapping(np.array([-1, 11], dtype=np.int64), 3)


@pytest.mark.parametrize("num_bytes", [1535, 1537, 0])
def test_storage_must_fit_exactly(num_bytes: int) -> None:
    with pytest.raises(KVStorageError, match=str(num_bytes)):
        GOLDEN.check_storage(num_bytes, 3)


@pytest.mark.parametrize(("slots", "page_size"), [(0, 4), (12, 0), (13, 4)])
def test_slots_must_fill_pages(slots: int, page_size: int) -> None:
    with pytest.raises(KVLayoutError, match=str(slots)):
        pages_for_slots(slots, page_size)


def test_dtype_bytes() -> None:
    widths = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}
    assert {dtype: kv_dtype_bytes(dtype) for dtype in widths} == widths


@pytest.mark.parametrize("dtype", ["fp4_e2m1", "int3", ""])
def test_dtypes_without_a_width_are_refused(dtype: str) -> None:
    with pytest.raises(KVDtypeError, match="KV dtype"):
        kv_dtype_bytes(dtype)


def test_packed_latent_row() -> None:
    assert packed_latent_token_bytes(512, 64) == 512 + 128 + 8 + 1
    for nope, rope in ((100, 64), (0, 64), (512, 0)):
        with pytest.raises(KVLayoutError):
            packed_latent_token_bytes(nope, rope)
