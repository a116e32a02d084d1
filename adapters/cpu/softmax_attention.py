"""Attention over dense keys and values, with the log of the softmax's denominator so that parts can be joined."""

from __future__ import annotations

import torch
from torch import Tensor

MASKED = -1.0e30
"""Added to a score that must not count. Finite, so that a row with every key masked stays free of NaN."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Softmax attention with any strides over all dimensions but the last.

    Args:
        query: [N, H, Q, D].
        key, value: [N, H, K, D].
        mask: added to the scores; broadcastable to [N, H, Q, K] with as many dimensions, type of ``query``.
        causal: query i sees keys 0..i (Q and K counted from the same start).

    Returns:
        The result [N, H, Q, D], and float32[N, H, Q]: natural log of the sum of exponentiated scores.
    """
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return output, log_sum


def attend_few(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    with_log_sum: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``attend`` for a handful of queries on each of many heads: two batched products around a softmax.

    Args:
        query: [N, H, Q, D].
        key, value: [N, H, K, D]; fastest with the keys' tokens innermost in memory.
        mask: [N, H, Q, K] or [N, H, 1, K].
        with_log_sum: whether the log sums are wanted; without them there is less to do.
    """
    merged = query.shape[0] * query.shape[1]
    queries, values = query.reshape(merged, *query.shape[2:]), value.flatten(0, 1)
    keys = key.flatten(0, 1).transpose(1, 2)
    if mask is None:
        # Without a mask the first argument counts zero times; it only has to have a shape that fits.
        scores = torch.baddbmm(queries[:, :, :1], queries, keys, beta=0, alpha=scale)
    else:
        scores = torch.baddbmm(mask.view(merged, -1, mask.shape[-1]), queries, keys, alpha=scale)
    if not with_log_sum:
        return torch.bmm(scores.softmax(-1), values).view(query.shape), None
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    output = torch.bmm(weights, values).div_(total)
    return output.view(query.shape), total.log_().add_(top).view(query.shape[:3])


def join(first: Tensor, first_log_sum: Tensor, second: Tensor, second_log_sum: Tensor) -> Tensor:
    """Attention over two disjoint sets of keys from the attention over each ([..., D] with [...] log sums)."""
    weight = torch.sigmoid(second_log_sum - first_log_sum).unsqueeze(-1)
    return torch.lerp(first, second, weight.to(first.dtype))


def length_mask(lengths: Tensor, width: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Mask of one query per row at the end of its sequence: [N, 1, 1, width].

    Args:
        lengths: int64[N], keys of each row; the query sits at position lengths - 1.
        window: keys the query sees, itself included; None for all.
    """
    positions = torch.arange(width)
    hidden = positions >= lengths.unsqueeze(1)
    if window is not None:
        hidden |= positions < (lengths - window).unsqueeze(1)
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, MASKED)
    return mask.view(lengths.shape[0], 1, 1, width)


def chunk_mask(first_query: int, num_queries: int, first_key: int, num_keys: int, window: int | None) -> Tensor:
    """float32[num_queries, num_keys] mask between consecutive positions, causal and within ``window``."""
    queries = torch.arange(first_query, first_query + num_queries).unsqueeze(1)
    keys = torch.arange(first_key, first_key + num_keys)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, MASKED)
