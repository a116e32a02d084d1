"""Parameters of rotary position embeddings, free of torch so that a configuration can be read without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3", "yarn"]
SUPPORTED_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """How positions become angles.

    Attributes:
        rope_type: which scaling is applied to the inverse frequencies.
        theta: base of the geometric series of wavelengths.
        rotary_dim: elements of each head that rotate, counted from the first; even, at most head_dim.
        factor: context extension (linear, llama3, yarn).
        original_context_length: context the model was pre-trained with (llama3, yarn).
        low_freq_factor, high_freq_factor: band that is interpolated (llama3).
        beta_fast, beta_slow: rotations within the original context between which the ramp lies (yarn).
        truncate: round the ends of the ramp to whole dimensions (yarn).
        attention_factor: multiplies cos and sin; 1.0 except for yarn.
    """

    rope_type: RopeType
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_context_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
