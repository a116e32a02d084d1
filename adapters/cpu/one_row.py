"""Decode attention of a single row in NumPy, on the tensors' own memory.

With one client the products of a layer's attention are small and what surrounds them is dispatch, after matrices that
have pushed everything else out of the caches: fewer and lighter operations save two milliseconds of a step. Both
products stay below the size at which NumPy's library would start threads of its own, which are not torch's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.cpu.decode_slab import Slab

_MAX_PRODUCT = 1 << 17
"""Multiplications of an attention product that certainly stay on one thread (OpenBLAS starts more from 2^18 on)."""


def can_attend(slab: Slab, repeat: int, length: int) -> bool:
    """Whether ``attend_one`` suits a sequence of this length with ``repeat`` query heads for each key head."""
    keys = slab.keys
    # A single query head would be a product with a vector, for which the library starts threads much earlier.
    return keys.dtype == torch.float32 and repeat > 1 and repeat * keys.shape[-1] * length <= _MAX_PRODUCT


def attend_one(
    slab: Slab,
    slot: int,
    length: int,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Append one token to a slot and attend with it.

    Args:
        length: tokens of the sequence with this one.
        query: [1, H, D]. key, value: [1, G, D].

    Returns:
        [1, H, D].
    """
    keys, values = slab.keys[layer, slot].numpy(), slab.values[layer, slot].numpy()
    keys[length - 1] = key[0].numpy()
    values[length - 1] = value[0].numpy()
    first = 0 if window is None else max(0, length - window)
    groups, head_dim = keys.shape[1:]
    queries = query.numpy().reshape(groups, -1, head_dim) * np.float32(scale)
    scores = queries @ keys[first:length].transpose(1, 2, 0)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    mixed = scores @ values[first:length].transpose(1, 0, 2)
    mixed /= scores.sum(axis=-1, keepdims=True)
    return torch.from_numpy(mixed.reshape(query.shape))
