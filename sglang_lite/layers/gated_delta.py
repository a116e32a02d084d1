"""Gated delta net: linear attention with one decay a head and token (arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from sglang_lite.adapters.base import Operations, PackedLinear
from sglang_lite.layers.delta_shape import DeltaShape
from sglang_lite.layers.recurrent_step import RecurrentStep

Splitter = Callable[[Tensor, Tensor, DeltaShape], tuple[Tensor, Tensor, Tensor, Tensor]]
"""(first projection, second projection, shape) -> mixed [T, conv_channels] with query | key | value, output gate
z [T, Hv, dv], beta and decay inputs b, a [T, Hv]."""


def split_flat(wide: Tensor, narrow: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Projections laid out query | key | value | z and b | a."""
    mixed, gate = wide.split_with_sizes([shape.conv_channels, shape.value_width], -1)
    b, a = narrow.chunk(2, -1)
    return mixed, gate.view(-1, shape.num_value_heads, shape.value_dim), b, a


def split_by_key_head(wide: Tensor, narrow: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Projections laid out per key head: its query, key, values and z; its b and a."""
    repeats = shape.num_value_heads // shape.num_key_heads
    values = repeats * shape.value_dim
    heads = wide.view(len(wide), shape.num_key_heads, -1)
    *parts, gate = heads.split_with_sizes([shape.key_dim, shape.key_dim, values, values], -1)
    mixed = torch.cat([part.flatten(1) for part in parts], -1)
    b, a = narrow.view(len(narrow), shape.num_key_heads, -1).split_with_sizes([repeats, repeats], -1)
    gate = gate.reshape(-1, shape.num_value_heads, shape.value_dim)
    return mixed, gate, b.flatten(1), a.flatten(1)


class GatedDeltaNet:
    """Convolved query, key and value under the gated delta rule; the output is normalised and gated.

    Args:
        layer: index among the layers with recurrent state.
        wide_proj, narrow_proj: the input projections, their outputs laid out as ``split`` expects.
        conv_weight: [conv_channels, K].
        decay_rate: float32[Hv], positive; dt_bias: float32[Hv]. The log of the decay is
            -decay_rate * softplus(a + dt_bias).
        norm: weight [dv] of the RMS norm over each head's output.
        output_proj: Hv * dv -> hidden.
    """

    __slots__ = (
        "_conv_weight",
        "_decay_rate",
        "_dt_bias",
        "_eps",
        "_layer",
        "_narrow_proj",
        "_norm",
        "_ops",
        "_output_proj",
        "_shape",
        "_split",
        "_wide_proj",
    )

    def __init__(
        self,
        ops: Operations,
        shape: DeltaShape,
        layer: int,
        wide_proj: PackedLinear,
        narrow_proj: PackedLinear,
        output_proj: PackedLinear,
        *,
        split: Splitter,
        conv_weight: Tensor,
        decay_rate: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        norm_eps: float,
    ) -> None:
        self._ops = ops
        self._shape = shape
        self._layer = layer
        self._wide_proj = wide_proj
        self._narrow_proj = narrow_proj
        self._output_proj = output_proj
        self._split = split
        self._conv_weight = conv_weight
        self._decay_rate = decay_rate
        self._dt_bias = dt_bias
        self._norm = norm
        self._eps = norm_eps

    def __call__(self, x: Tensor, step: RecurrentStep) -> Tensor:
        """[T, hidden] -> [T, hidden]; moves the states of the step's rows on."""
        recurrent = self._ops.recurrent
        mixed, gate, b, a = self._split(self._wide_proj(x), self._narrow_proj(x), self._shape)
        mixed = recurrent.causal_conv(mixed, self._conv_weight, step.tails[self._layer], step.plan)
        query, key, value = self._shape.split_heads(mixed)
        log_decay = -self._decay_rate * functional.softplus(a.float() + self._dt_bias)
        state = step.states[self._layer]
        output = recurrent.gated_delta(query, key, value, log_decay, b.float().sigmoid(), state, step.plan)
        output = self._ops.rms_norm(output, self._norm, self._eps) * functional.silu(gate)
        return self._output_proj(output.flatten(1))
