"""A rank's KV pool as transfers see it."""

from __future__ import annotations

from sglang_lite.disaggregation.pairing import heads_of
from sglang_lite.disaggregation.pool_memory import HeadLayout, PoolMemory
from sglang_lite.execution.build import EngineLimits
from sglang_lite.models.description import ModelDescription


def transfer_memory(
    limits: EngineLimits, description: ModelDescription, rank: int = 0, size: int = 1
) -> PoolMemory | None:
    """The pool of one of ``size`` ranks; None where it cannot be transferred: on a device, so far.

    Args:
        limits: of the rank.
        description: of the whole model.
    """
    geometry = limits.geometry
    if not limits.pool_address:
        return None
    heads = None
    total = geometry.num_kv_heads
    if geometry.num_tensors > 1:  # a latent row is every rank's
        total = description.kv.num_kv_heads
        heads = HeadLayout(total, heads_of(total, size, rank), geometry.head_dim * geometry.dtype.itemsize)
    extents = (geometry.num_layers, geometry.num_tensors, geometry.page_size, total, geometry.head_dim)
    return PoolMemory(
        limits.pool_address,
        geometry.num_pages,
        geometry.page_bytes,
        geometry.page_size,
        limits.kv_dtype,
        "-".join(map(str, extents)),
        heads=heads,
    )
