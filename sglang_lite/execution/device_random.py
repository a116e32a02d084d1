"""The random numbers of ``execution.random_numbers`` made on a device: the same numbers, so the same tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number: products and sums wrap to the same bits."""
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _xor_shift(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >> bits) with zeros shifted in."""
    return x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64."""
    return _xor_shift(_xor_shift(_xor_shift(x, 30) * _FIRST, 27) * _SECOND, 31)


def exponentials(seed: Tensor, counter: Tensor, vocab_size: int) -> Tensor:
    """float64[S, V]: exponentially distributed numbers, a function of (seed, counter, token id) each.

    Args:
        seed, counter: int64[S].
    """
    start = _mix(_mix(seed + _GOLDEN) + (counter + 1) * _GOLDEN)
    tokens = (torch.arange(1, vocab_size + 1, dtype=torch.int64, device=seed.device) * _GOLDEN).unsqueeze(0)
    bits = _mix(start.unsqueeze(1) + tokens)
    shares = ((bits >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)
    return shares.log_().neg_()
