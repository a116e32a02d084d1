"""Rotary position embeddings: inverse frequencies of every supported scaling and the cos/sin table."""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor

from sglang_lite.layers.rope_parameters import RopeParameters

_EAGER_POSITIONS = 32_768
"""Positions computed at once; up to here a step never looks whether the table is long enough."""

_FILL_STEP = 8_192


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
    """cos and sin of every position below ``num_positions``, one row a position.

    A table rather than cos and sin of the step's positions: a position's values then never depend on the batch.
    On the host, rows past ``_EAGER_POSITIONS`` are computed when a position first needs them, so that the memory of a
    context of a million tokens is only spent when it is used. Elsewhere looking at the positions would stall the
    device, so that all rows are there from the start.
    """

    def __init__(self, rope: RopeParameters, num_positions: int, device: torch.device) -> None:
        self.num_positions = num_positions
        self._pairs = rope.rotary_dim // 2
        self._frequencies = inverse_frequencies(rope)
        self._attention_factor = rope.attention_factor
        self._table = torch.empty(num_positions, rope.rotary_dim, dtype=torch.float32, device=device)
        self._num_filled = 0
        self._fill(_EAGER_POSITIONS if device.type == "cpu" else num_positions)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64[T] -> cos and sin, each float32[T, rotary_dim / 2] (views of one gather).

        Raises:
            IndexError: a position is not below ``num_positions``.
        """
        if self._num_filled < self.num_positions:
            self._fill(int(positions.max()) + 1)
        rows = self._table.index_select(0, positions)
        return rows[:, : self._pairs], rows[:, self._pairs :]

    def _fill(self, num_positions: int) -> None:
        """Compute the rows below ``num_positions``, rounded up, that are not there yet."""
        if num_positions <= self._num_filled:
            return
        start, stop = self._num_filled, min(-(-num_positions // _FILL_STEP) * _FILL_STEP, self.num_positions)
        angles = torch.outer(torch.arange(start, stop, dtype=torch.float32), self._frequencies)
        rows = torch.cat([angles.cos(), angles.sin()], dim=-1)
        self._table[start:stop] = rows if self._attention_factor == 1.0 else rows * self._attention_factor
        self._num_filled = stop
