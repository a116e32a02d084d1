"""Rotary position embeddings: inverse frequencies of every supported scaling and the cos/sin table."""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor

from sglang_lite.layers.rope_parameters import RopeParameters


def inverse_frequencies(rope: RopeParameters) -> Tensor:
    """Angle per position of each rotated pair: float32[rotary_dim / 2]."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    plain = 1.0 / torch.pow(torch.tensor(rope.theta, dtype=torch.float32), exponents)
    match rope.rope_type:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope)
        case _:
            assert_never(rope.rope_type)


def _llama3(plain: Tensor, rope: RopeParameters) -> Tensor:
    """Llama 3: divide the long wavelengths by the factor, keep the short ones, interpolate between."""
    context = rope.original_context_length
    wavelengths = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = ((context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn(plain: Tensor, rope: RopeParameters) -> Tensor:
    """YaRN (arXiv 2309.00071): a ramp over the pairs from extrapolation (fast pairs) to interpolation (slow ones)."""
    low, high = _yarn_ramp_ends(rope)
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_ramp_ends(rope: RopeParameters) -> tuple[float, float]:
    def pair_index(rotations: float) -> float:
        """Pair that makes this many turns within the original context."""
        span = math.log(rope.original_context_length / (rotations * 2 * math.pi))
        return rope.rotary_dim * span / (2 * math.log(rope.theta))

    low, high = pair_index(rope.beta_fast), pair_index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # keeps the ramp a step instead of 0 / 0
    return low, high


class RotaryTable:
    """cos and sin of every position up to ``num_positions``, one row a position.

    A table rather than cos and sin of the step's positions: a position's values then never depend on the batch.
    """

    def __init__(self, rope: RopeParameters, num_positions: int, device: torch.device) -> None:
        self.num_positions = num_positions
        self._pairs = rope.rotary_dim // 2
        table = torch.empty(num_positions, 2 * self._pairs, dtype=torch.float32)
        positions = torch.arange(num_positions, dtype=torch.float32)
        cos, sin = table[:, : self._pairs], table[:, self._pairs :]
        torch.outer(positions, inverse_frequencies(rope), out=sin)
        torch.cos(sin, out=cos)
        torch.sin(sin, out=sin)
        if rope.attention_factor != 1.0:
            table.mul_(rope.attention_factor)
        self._table = table.to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64[T] -> cos and sin, each float32[T, rotary_dim / 2] (views of one gather)."""
        rows = self._table.index_select(0, positions)
        return rows[:, : self._pairs], rows[:, self._pairs :]
