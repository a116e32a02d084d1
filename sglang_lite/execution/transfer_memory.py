"""A rank's KV pool as transfers see it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_lite.disaggregation.pairing import heads_of
from sglang_lite.disaggregation.pool_memory import HeadLayout, PoolMemory
from sglang_lite.execution.build import EngineLimits
from sglang_lite.models.description import ModelDescription
from sglang_lite.transfer.base import HOST


def transfer_memory(
    limits: EngineLimits, description: ModelDescription, rank: int = 0, size: int = 1
) -> PoolMemory | None:
    """The pool of one of ``size`` ranks; None where it cannot be transferred, because it may move.

    Args:
        limits: of the rank.
        description: of the whole model.
    """
    geometry, pool = limits.geometry, limits.pool
    if pool is None:
        return None
    heads = None
    total = geometry.num_kv_heads
    if geometry.num_tensors > 1:  # a latent row is every rank's
        total = description.kv.num_kv_heads
        heads = HeadLayout(total, heads_of(total, size, rank), geometry.head_dim * geometry.dtype.itemsize)
    extents = (geometry.num_layers, geometry.num_tensors, geometry.page_size, total, geometry.head_dim)
    location = location_of(pool.device)
    return PoolMemory(
        pool.data_ptr(),
        geometry.num_pages,
        geometry.page_bytes,
        geometry.page_size,
        limits.kv_dtype,
        "-".join(map(str, extents)),
        location,
        None if location == HOST else page_reader(pool),
        heads,
    )


def location_of(device: torch.device) -> str:
    """How transfers name a device's memory."""
    return HOST if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def page_reader(pool: Tensor) -> Callable[[int], bytes]:
    """Copies a page of a pool on a device to the host; waits for the copy, not for steps on other streams."""

    def read(page: int) -> bytes:
        return pool[page].view(torch.uint8).cpu().numpy().tobytes()

    return read
