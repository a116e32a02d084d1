"""C984: a step whose slots or pages are not in the pool is a typed error before any kernel is called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch

from sglang_lite.adapters.base import AttentionBatch, KVGeometry, OperationInputError, Operations
from sglang_lite.adapters.verification import host_subject
from tests.support.kernel_doubles.everything import doubled_subject, installed_everything

GEOMETRY = KVGeometry(num_pages=4, page_size=4, num_layers=1, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)


@pytest.fixture
def calls() -> Iterator[list[str]]:
    seen: list[str] = []

    def observe(path: str, bound: inspect.BoundArguments) -> None:
        seen.append(path)

    with installed_everything("sglang-kernel", observe):
        yield seen


@pytest.fixture(params=["host", "doubles"])
def operations(request: pytest.FixtureRequest, calls: list[str]) -> Operations:
    subject = host_subject() if request.param == "host" else doubled_subject("sglang-kernel")
    calls.clear()
    return subject.operations


def batch(slots: list[int], pages: list[list[int]]) -> AttentionBatch:
    tokens = len(slots)
    return AttentionBatch(
        num_decode=tokens,
        query_lens=[1] * tokens,
        kv_lens=[1] * tokens,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        page_table=torch.tensor(pages, dtype=torch.int64).reshape(tokens, 1),
    )


@pytest.mark.parametrize(
    ("slots", "pages", "message"),
    [
        ([], [], "empty"),
        ([4, 16], [[1], [4]], r"slot_mapping\[1\] is 16.*16 slots"),
        ([-1], [[0]], r"slot_mapping\[0\] is -1"),
    ],
)
def test_slots_outside_the_pool(
    operations: Operations, calls: list[str], slots: list[int], pages: list[list[int]], message: str
) -> None:
    with pytest.raises(OperationInputError, match=message):
        operations.plan_attention(batch(slots, pages), GEOMETRY)
    assert calls == []


def test_slots_inside_the_pool(operations: Operations) -> None:
    operations.plan_attention(batch([4, 15], [[1], [3]]), GEOMETRY)


def test_pages_outside_the_pool_of_a_device(calls: list[str]) -> None:
    """Kernels read pages by the page table, not by slots."""
    operations = doubled_subject("sglang-kernel").operations
    calls.clear()
    with pytest.raises(OperationInputError, match="names page 7; the pool has 4 pages"):
        operations.plan_attention(batch([4, 8], [[1], [7]]), GEOMETRY)
    assert calls == []
