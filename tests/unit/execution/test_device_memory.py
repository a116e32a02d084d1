"""Sizes on an accelerator: the share for weights and KV, pages, captured batches."""

from __future__ import annotations

import pytest

from sglang_lite.config import ServerConfig
from sglang_lite.execution.decode_graphs import default_batch_sizes
from sglang_lite.execution.device import DeviceMemory
from sglang_lite.execution.device_memory import (
    DeviceDefaults,
    device_defaults,
    graph_batch_sizes,
    kv_bytes,
    plan_pages,
    static_fraction,
)
from sglang_lite.types import StartupError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("gib", "chunk", "largest"),
    [(16, 2048, 8), (24, 4096, 48), (48, 4096, 32), (80, 8192, 256), (141, 8192, 256), (192, 16384, 512)],
)
def test_defaults_by_size(gib: int, chunk: int, largest: int) -> None:
    assert device_defaults(gib * GIB) == DeviceDefaults(chunk, largest)


def test_share_of_the_device() -> None:
    config = ServerConfig()
    assert static_fraction(config, 80 * GIB, 256) == pytest.approx(1 - (512 + 1.5 * 8192 + 128 + 512) / (80 * 1024))
    assert static_fraction(config, 141 * GIB, 0) == pytest.approx(1 - (512 + 1.5 * 8192 + 128) / (141 * 1024))
    small_chunk = ServerConfig(chunked_prefill_size=512)
    assert static_fraction(small_chunk, 80 * GIB, 0) == pytest.approx(70 / 80)
    assert static_fraction(small_chunk, 24 * GIB, 8) == pytest.approx(1 - (512 + 3072 + 128 + 16) / (24 * 1024))
    assert static_fraction(ServerConfig(mem_fraction_static=0.5), 80 * GIB, 256) == 0.5


def test_weights_and_kv_together_fill_the_share() -> None:
    """Weights take 30 GiB of 80; with a share of 0.75 the pool gets the rest of 60."""
    assert kv_bytes(DeviceMemory(80 * GIB, 50 * GIB), 0.75) == 30 * GIB
    assert kv_bytes(DeviceMemory(80 * GIB, 10 * GIB), 0.75) == 0


def test_pages() -> None:
    memory = DeviceMemory(80 * GIB, 50 * GIB)
    config = ServerConfig(page_size=16)
    assert plan_pages(config, 1 << 20, 100 << 20, memory, 0.8) == 99  # one more is allocated for padding
    assert plan_pages(ServerConfig(max_total_tokens=64), 1 << 20, 0, memory, 0.8) == 4
    with pytest.raises(StartupError, match=r"static share of 0\.800 that leaves no page.*--tp-size"):
        plan_pages(config, 1 << 20, 1 << 20, memory, 0.8)
    with pytest.raises(StartupError, match=r"--max-total-tokens asks for 1600 .* 50\.0 GiB free"):
        plan_pages(ServerConfig(max_total_tokens=1600), GIB, 0, memory, 0.8)


def test_batches_to_capture() -> None:
    assert default_batch_sizes(10) == (1, 2, 4, 8, 10)
    sizes = default_batch_sizes(512)
    assert sizes[:4] == (1, 2, 4, 8) and sizes[-1] == 512 and 256 in sizes and len(sizes) < 40
    assert graph_batch_sizes(ServerConfig(), 80 * GIB, 100)[-1] == 100
    assert graph_batch_sizes(ServerConfig(), 16 * GIB, 100)[-1] == 8
    assert graph_batch_sizes(ServerConfig(cuda_graph_max_bs_decode=20), 16 * GIB, 100)[-1] == 20
    assert graph_batch_sizes(ServerConfig(cuda_graph_bs_decode=["8", "200"]), 16 * GIB, 100) == (8,)
    assert graph_batch_sizes(ServerConfig(disable_cuda_graph=True), 80 * GIB, 100) == ()
