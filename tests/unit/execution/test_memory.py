"""How many pages the pool gets, and what memory there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.config import ServerConfig
from sglang_lite.execution.kv_pool import allocate_kv_pool, kv_page_layout
from sglang_lite.execution.memory import MAX_SLOTS_FROM_MEMORY, available_memory, plan_kv_budget
from sglang_lite.types import StartupError


def pages(available: int = 1 << 30, bytes_per_token: int = 1024, **options: Any) -> int:
    config = ServerConfig(model_path="x", device="cpu", **options)
    return plan_kv_budget(config, bytes_per_token, available, 2048).num_pages


def test_slots_asked_for_come_first() -> None:
    assert pages(max_total_tokens=4096) == 256
    assert pages(max_total_tokens=4096, num_reserved_decode_tokens=512, mem_fraction_static=0.9) == 256
    assert pages(num_reserved_decode_tokens=512) == 32
    assert pages(disaggregation_mode="prefill") == 32


def test_capacity_from_memory() -> None:
    available, page = 1 << 30, 16 * 4096
    for share in (0.25, 0.5, None):
        budget = available * (share or 0.5)
        count = pages(available, 4096, mem_fraction_static=share)
        assert 0.5 * budget <= count * page <= budget
    assert pages(1 << 40, 16) == MAX_SLOTS_FROM_MEMORY // 16


def test_without_a_workspace_the_pool_gets_its_share() -> None:
    config = ServerConfig(model_path="x", device="cpu", mem_fraction_static=0.5)
    budget = plan_kv_budget(config, 4096, 1 << 30, 2048, workspace_share=0.0)
    assert budget.workspace_bytes == 0
    assert budget.num_pages == (1 << 29) // (16 * 4096)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"page_size": 0}, ["--page-size 0"]),
        ({"max_total_tokens": 0}, ["--max-total-tokens 0"]),
        ({"max_total_tokens": 100}, ["--max-total-tokens 100", "--page-size 16", "96", "112"]),
        ({"num_reserved_decode_tokens": 0}, ["--num-reserved-decode-tokens 0"]),
        ({"num_reserved_decode_tokens": 17}, ["--num-reserved-decode-tokens 17", "--page-size 16"]),
    ],
)
def test_sizes_that_cannot_be(options: dict[str, int], named: list[str]) -> None:
    with pytest.raises(StartupError) as caught:
        pages(**options)
    assert all(text in str(caught.value) for text in named), str(caught.value)


def test_too_little_memory_says_what_to_do() -> None:
    with pytest.raises(StartupError, match="--max-total-tokens"):
        pages(1000)


def make_machine(root: Path, *, available_kib: int, group: str) -> tuple[Path, Path]:
    proc, control = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available_kib} kB\n")
    (proc / "self" / "cgroup").write_text(f"0::{group}\n")
    (control / group.strip("/")).mkdir(parents=True, exist_ok=True)
    return proc, control


def test_available_memory_is_the_machine_or_the_control_group(tmp_path: Path) -> None:
    proc, control = make_machine(tmp_path, available_kib=1000, group="/a/b")
    assert available_memory(proc, control) == 1000 * 1024
    (control / "a" / "b" / "memory.max").write_text("max\n")
    assert available_memory(proc, control) == 1000 * 1024
    (control / "a" / "memory.max").write_text("500000\n")  # the parent's limit holds for the child
    (control / "a" / "memory.current").write_text("200000\n")
    (control / "a" / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert available_memory(proc, control) == 350000
    assert available_memory() > 0


def test_pool_memory_is_laid_out_as_the_page_contract_says() -> None:
    """3 pages of 4 tokens, 2 layers, 2 heads of 8: (page 1, layer 1, V, token 3) is bytes [992, 1024)."""
    geometry = KVGeometry(3, 4, 2, 2, 8, torch.bfloat16)
    pool = allocate_kv_pool(geometry, torch.device("cpu"))
    assert pool.is_contiguous() and pool.numel() * pool.element_size() == 1536
    assert geometry.bytes_per_token == 128 and geometry.page_bytes == 512
    assert kv_page_layout(geometry).page_bytes == geometry.page_bytes
    pool.zero_()
    pool[1, 1, 1, 3] = 1.0
    flat = pool.view(torch.uint8).flatten()
    assert flat.nonzero().min() >= 992 and flat.nonzero().max() < 1024
    assert kv_page_layout(geometry).offset(1, 1, 1, 3) == 992


def test_a_pool_of_latent_rows_keeps_one_row_per_token_and_layer() -> None:
    """Latent width 2, rotary width 2, float32: 16 bytes per token and layer, of which the value is the first half."""
    geometry = KVGeometry(3, 4, 2, 1, 4, torch.float32, num_tensors=1, latent_width=2)
    pool = allocate_kv_pool(geometry, torch.device("cpu"))
    assert pool.shape == (3, 2, 1, 4, 1, 4)
    assert (geometry.key_width, geometry.value_width) == (4, 2)
    assert geometry.bytes_per_token == 2 * 16 and geometry.page_bytes == 4 * 2 * 16
    layout = kv_page_layout(geometry)
    assert layout.page_bytes == geometry.page_bytes and layout.tensor_token_bytes == (16,)
    pool.zero_()
    pool[1, 1, 0, 3] = 1.0
    written = pool.view(torch.uint8).flatten().nonzero()
    start, stop = layout.span(slot=7, layer=1, tensor=0)
    assert start <= written.min() and written.max() < stop


def test_a_pool_that_cannot_be_allocated_is_explained() -> None:
    geometry = KVGeometry(2**50, 16, 2, 2, 8, torch.float32)
    with pytest.raises(StartupError, match="--max-total-tokens"):
        allocate_kv_pool(geometry, torch.device("cpu"))
