"""Kimi delta attention: the gated delta rule with a decay for every channel of the key (arXiv 2510.26692)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from sglang_lite.adapters.base import Operations, PackedLinear
from sglang_lite.layers.delta_shape import DeltaShape
from sglang_lite.layers.recurrent_step import RecurrentStep


class ChannelDeltaAttention:
    """Convolved query, key and value under the delta rule; decay and output gate come from low-rank projections.

    Args:
        layer: index among the layers with recurrent state.
        qkv_proj: hidden -> query | key | value.
        low_rank_proj: hidden -> inputs of ``decay_proj`` | inputs of ``gate_proj``. beta_proj: hidden -> H.
        decay_proj: dv -> H * dk. gate_proj: dv -> H * dv.
        conv_weight: [conv_channels, K].
        decay_rate: float32[H, 1], positive; dt_bias: float32[H, dk].
        norm: weight [dv] of the RMS norm over each head's output.
        output_proj: H * dv -> hidden.
    """

    __slots__ = (
        "_beta_proj",
        "_conv_weight",
        "_decay_proj",
        "_decay_rate",
        "_dt_bias",
        "_eps",
        "_gate_proj",
        "_layer",
        "_low_rank_proj",
        "_norm",
        "_ops",
        "_output_proj",
        "_qkv_proj",
        "_shape",
    )

    def __init__(
        self,
        ops: Operations,
        shape: DeltaShape,
        layer: int,
        qkv_proj: PackedLinear,
        low_rank_proj: PackedLinear,
        beta_proj: PackedLinear,
        decay_proj: PackedLinear,
        gate_proj: PackedLinear,
        output_proj: PackedLinear,
        *,
        conv_weight: Tensor,
        decay_rate: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        norm_eps: float,
    ) -> None:
        self._ops = ops
        self._shape = shape
        self._layer = layer
        self._qkv_proj = qkv_proj
        self._low_rank_proj = low_rank_proj
        self._beta_proj = beta_proj
        self._decay_proj = decay_proj
        self._gate_proj = gate_proj
        self._output_proj = output_proj
        self._conv_weight = conv_weight
        self._decay_rate = decay_rate
        self._dt_bias = dt_bias
        self._norm = norm
        self._eps = norm_eps

    def __call__(self, x: Tensor, step: RecurrentStep) -> Tensor:
        """[T, hidden] -> [T, hidden]; moves the states of the step's rows on."""
        recurrent, shape = self._ops.recurrent, self._shape
        tails, states = step.tails[self._layer], step.states[self._layer]
        mixed = recurrent.causal_conv(self._qkv_proj(x), self._conv_weight, tails, step.plan)
        query, key, value = shape.split_heads(mixed)
        ranks = [self._decay_proj.in_features, self._gate_proj.in_features]
        decay_input, gate_input = self._low_rank_proj(x).split_with_sizes(ranks, -1)
        decay = self._decay_proj(decay_input).float().view(-1, shape.num_key_heads, shape.key_dim)
        log_decay = -self._decay_rate * functional.softplus(decay + self._dt_bias)
        beta = self._beta_proj(x).float().sigmoid()
        output = recurrent.gated_delta(query, key, value, log_decay, beta, states, step.plan)
        gate = self._gate_proj(gate_input).sigmoid()
        output = self._ops.rms_norm(output, self._norm, self._eps).flatten(1) * gate
        return self._output_proj(output)
