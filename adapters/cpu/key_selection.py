"""Sparse attention's choice of keys: index scores and the mask that keeps the best of them."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_lite.adapters.cpu.softmax_attention import MASKED

_SCORE_BYTES = 64 << 20
"""Index scores of all heads made at a time."""


def selection_mask(query: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Which keys each query keeps, as a mask to add to its scores.

    Args:
        query: [N, Q, n, di], n index heads. weights: float32[N, Q, n]. keys: [N, K, di].
        visible: bool[N, Q, K], keys that a query may see at all.
        top_k: keys it keeps of those, fewer where it sees fewer.

    Returns:
        float32[N, Q, K]: 0 for a kept key, ``MASKED`` for every other.
    """
    num_rows, num_queries, num_heads, _ = query.shape
    keys = keys.float().transpose(1, 2).unsqueeze(1)
    step = max(1, _SCORE_BYTES // (4 * num_rows * num_heads * visible.shape[2]))
    masks = []
    for start in range(0, num_queries, step):
        part = slice(start, start + step)
        by_head = torch.matmul(query[:, part].float(), keys).relu_()
        scores = torch.matmul(weights[:, part].unsqueeze(2), by_head).squeeze(2)
        scores.masked_fill_(~visible[:, part], float("-inf"))
        chosen = _best(scores, min(top_k, scores.shape[-1])).logical_and_(visible[:, part])
        masks.append(torch.full_like(scores, MASKED).masked_fill_(chosen, 0.0))
    return torch.cat(masks, 1)


def _best(scores: Tensor, count: int) -> Tensor:
    """bool[..., K]: the ``count`` largest of each row, of equal ones the first.

    Scores are often exactly 0 (no index head finds the key), and which of such keys ``topk`` takes depends on what
    else is in the batch.
    """
    least = scores.topk(count, -1).values[..., -1:]
    above = scores > least
    equal = scores == least
    room = count - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above.logical_or_(equal.logical_and_(equal.cumsum(-1, dtype=torch.int32) <= room))
