"""Latent attention through the doubles of the kernels against the host's, over a mixed step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sglang_lite.adapters.base import AttentionBatch, KVGeometry, OperationInputError
from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.adapters.latent import KeySelection
from tests.support.kernel_doubles import HOPPER, installed_kernels
from tests.support.kernel_doubles.checks import KernelError

PAGE_SIZE, NUM_PAGES, LAYERS, HEADS, LATENT, ROPE, NOPE, VALUE = 4, 40, 2, 3, 512, 64, 16, 8
QUERY_LENS, KV_LENS, NUM_DECODE = [1, 1, 5, 2], [9, 4, 5, 7], 2


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with installed_kernels():
        yield


def mixed_batch() -> AttentionBatch:
    free = np.random.default_rng(0).permutation(NUM_PAGES).tolist()
    table = torch.zeros(len(KV_LENS), 4, dtype=torch.int64)
    slots = []
    for row, (count, length) in enumerate(zip(QUERY_LENS, KV_LENS, strict=True)):
        pages = [free.pop() for _ in range(-(-length // PAGE_SIZE))]
        table[row, : len(pages)] = torch.tensor(pages)
        slots += [pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(length - count, length)]
    return AttentionBatch(NUM_DECODE, QUERY_LENS, KV_LENS, torch.tensor(slots), table)


def geometry(width: int) -> KVGeometry:
    return KVGeometry(NUM_PAGES, PAGE_SIZE, LAYERS, 1, width, torch.bfloat16, 1, LATENT)


@pytest.mark.parametrize("index_width", [0, 32])
def test_equals_the_host(index_width: int) -> None:
    """Behind the rotary part a row may have an index key, which attention over all keys never reads."""
    torch.manual_seed(0)
    width = LATENT + ROPE + index_width
    pool = torch.randn(geometry(width).pool_shape).bfloat16()
    host_pool = pool.clone()
    weight = (0.05 * torch.randn(HEADS * (NOPE + VALUE), LATENT)).bfloat16()
    device, host = CudaOperations(torch.device("cpu"), HOPPER, workspace_bytes=64), CpuOperations(measure=False)
    batch = mixed_batch()
    device_plan, host_plan = (ops.plan_attention(batch, geometry(width)) for ops in (device, host))
    for layer in range(LAYERS):
        tokens = sum(QUERY_LENS)
        nope = torch.randn(tokens, HEADS, NOPE + ROPE).bfloat16()
        rows = torch.randn(tokens, width).bfloat16()
        arguments = (nope[..., :NOPE], nope[..., NOPE:], rows)
        got = device.latent.attention(
            *arguments, device.latent.pack_projection(weight, HEADS, NOPE), pool, layer, device_plan, scale=0.1
        )
        expected = host.latent.attention(
            *arguments, host.latent.pack_projection(weight, HEADS, NOPE), host_pool, layer, host_plan, scale=0.1
        )
        assert got.shape == (tokens, HEADS * VALUE)
        torch.testing.assert_close(got, expected, atol=5e-2, rtol=5e-2)
    written = slice(0, LATENT + ROPE)
    torch.testing.assert_close(pool[..., written], host_pool[..., written], atol=0, rtol=0)


def test_a_needed_selection_is_refused() -> None:
    device = CudaOperations(torch.device("cpu"), HOPPER, workspace_bytes=64)
    assert device.latent.selects_keys is False
    tokens = sum(QUERY_LENS)
    selection = KeySelection(torch.randn(tokens, 2, 32), torch.randn(tokens, 2), 8)
    with pytest.raises(OperationInputError, match=r"9 tokens needs a selection of 8 keys.*--context-length"):
        device.latent.attention(
            torch.randn(tokens, HEADS, NOPE).bfloat16(),
            torch.randn(tokens, HEADS, ROPE).bfloat16(),
            torch.randn(tokens, LATENT + ROPE + 32).bfloat16(),
            device.latent.pack_projection(torch.randn(HEADS * (NOPE + VALUE), LATENT).bfloat16(), HEADS, NOPE),
            torch.zeros(geometry(LATENT + ROPE + 32).pool_shape, dtype=torch.bfloat16),
            0,
            device.plan_attention(mixed_batch(), geometry(LATENT + ROPE + 32)),
            scale=0.1,
            selection=selection,
        )


def test_the_doubles_refuse_other_widths() -> None:
    device = CudaOperations(torch.device("cpu"), HOPPER, workspace_bytes=64)
    tokens = sum(QUERY_LENS)
    wide = KVGeometry(NUM_PAGES, PAGE_SIZE, 1, 1, 96, torch.bfloat16, 1, 64)
    with pytest.raises(KernelError, match=r"latent rows of 64 \+ 32"):
        device.latent.attention(
            torch.randn(tokens, HEADS, NOPE).bfloat16(),
            torch.randn(tokens, HEADS, 32).bfloat16(),
            torch.randn(tokens, 96).bfloat16(),
            device.latent.pack_projection(torch.randn(HEADS * (NOPE + VALUE), 64).bfloat16(), HEADS, NOPE),
            torch.zeros(wide.pool_shape, dtype=torch.bfloat16),
            0,
            device.plan_attention(mixed_batch(), wide),
            scale=0.1,
        )
