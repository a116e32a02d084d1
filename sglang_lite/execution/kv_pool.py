"""The KV pool: one allocation for all pages of all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.cache.layout import KVPageLayout
from sglang_lite.types import StartupError


def kv_page_layout(geometry: KVGeometry) -> KVPageLayout:
    """Byte offsets within a pool of this geometry."""
    return KVPageLayout.for_heads(
        page_size=geometry.page_size,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        element_bytes=geometry.dtype.itemsize,
    )


def allocate_kv_pool(geometry: KVGeometry, device: torch.device) -> Tensor:
    """A pool [pages, layers, 2, page_size, G, D], contiguous.

    Host memory is only reserved: the operating system hands out (zeroed) memory as pages are first written.
    """
    shape = (
        geometry.num_pages,
        geometry.num_layers,
        2,
        geometry.page_size,
        geometry.num_kv_heads,
        geometry.head_dim,
    )
    try:
        pool = torch.empty(shape, dtype=geometry.dtype, device=device)
    except RuntimeError as error:
        size = geometry.num_pages * geometry.page_bytes / 2**30
        raise StartupError(
            f"the KV pool of {geometry.num_pages * geometry.page_size} token slots takes {size:.1f} GiB, which cannot "
            f"be allocated; choose a smaller --max-total-tokens or --mem-fraction-static"
        ) from error
    kv_page_layout(geometry).check_storage(pool.numel() * pool.element_size(), geometry.num_pages)
    return pool
