"""The KV pool: one allocation for all pages of all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.cache.layout import KVPageLayout
from sglang_lite.types import StartupError


def kv_page_layout(geometry: KVGeometry) -> KVPageLayout:
    """Byte offsets within a pool of this geometry."""
    width = geometry.key_width * geometry.dtype.itemsize
    return KVPageLayout(geometry.page_size, geometry.num_layers, (width,) * geometry.num_tensors)


def allocate_kv_pool(geometry: KVGeometry, device: torch.device) -> Tensor:
    """A pool [pages, layers, tensors, page_size, G, D], contiguous.

    Host memory is only reserved: the operating system hands out (zeroed) memory as pages are first written.
    """
    try:
        pool = torch.empty(geometry.pool_shape, dtype=geometry.dtype, device=device)
    except RuntimeError as error:
        size = geometry.num_pages * geometry.page_bytes / 2**30
        raise StartupError(
            f"the KV pool of {geometry.num_pages * geometry.page_size} token slots takes {size:.1f} GiB, which cannot "
            f"be allocated; choose a smaller --max-total-tokens or --mem-fraction-static"
        ) from error
    kv_page_layout(geometry).check_storage(pool.numel() * pool.element_size(), geometry.num_pages)
    return pool
