"""Doubles of the causal convolution, one token at a time from the kernels' documentation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.kernel_doubles.capture import kernel
from tests.support.kernel_doubles.checks import check_float, check_int32, require


def _check(name: str, x: Tensor, weight: Tensor, state: Tensor, silu_activation: bool, bias: Tensor | None) -> None:
    check_float(name, x, weight, state)
    require(2 <= weight.shape[1] <= 4, f"{name}: 2 to 4 taps")
    require(weight.is_contiguous() and state.stride(-1) == 1, f"{name}: strides")
    require(state.shape[1:] == (weight.shape[0], weight.shape[1] - 1), f"{name}: state [rows, C, K - 1]")
    require(silu_activation and bias is None, f"{name}: doubled with silu and without bias")


def _token(window: Tensor, weight: Tensor) -> Tensor:
    return functional.silu((window.float() * weight.float()).sum(-1))


@kernel
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias_: Tensor | None,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    pad_slot_id: int,
) -> None:
    name = "causal_conv1d_update"
    _check(name, x, weight, conv_state, silu_activation, bias_)
    require(x.dim() == 3 and x.shape[2] == 1 and cache_seqlens is None, f"{name}: x [B, C, 1]")
    assert conv_state_indices is not None
    check_int32(name, conv_state_indices)
    for row, slot in enumerate(conv_state_indices.tolist()):
        if slot == pad_slot_id:
            continue
        window = torch.cat([conv_state[slot], x[row]], -1)
        conv_state[slot] = window[:, 1:]
        x[row, :, 0] = _token(window, weight)


@kernel
def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias_: Tensor | None,
    conv_states: Tensor | None,
    query_start_loc: Tensor | None,
    cache_indices: Tensor | None,
    has_initial_state: Tensor | None,
    silu_activation: bool,
    pad_slot_id: int,
) -> None:
    name = "causal_conv1d_fwd"
    assert conv_states is not None and query_start_loc is not None
    assert cache_indices is not None and has_initial_state is not None
    _check(name, x, weight, conv_states, silu_activation, bias_)
    check_int32(name, query_start_loc, cache_indices)
    require(has_initial_state.dtype == torch.bool and has_initial_state.dim() == 1, f"{name}: has_initial_state bool")
    require(x.shape[0] == weight.shape[0] and x.stride(1) == 1, f"{name}: x [C, tokens], tokens side by side")
    starts = query_start_loc.tolist()
    require(starts[0] == 0 and starts[-1] == x.shape[1], f"{name}: query_start_loc covers the tokens")
    taps = weight.shape[1]
    for sequence, slot in enumerate(cache_indices.tolist()):
        tokens = x[:, starts[sequence] : starts[sequence + 1]].clone()
        tail = conv_states[slot] if has_initial_state[sequence] else torch.zeros_like(conv_states[slot])
        inputs = torch.cat([tail, tokens], -1)
        conv_states[slot] = inputs[:, inputs.shape[1] - taps + 1 :]
        for token in range(tokens.shape[1]):
            x[:, starts[sequence] + token] = _token(inputs[:, token : token + taps], weight).to(x.dtype)
