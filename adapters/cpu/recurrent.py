"""The operations of ``adapters.recurrent`` in torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cpu.delta_rule import decode_step, solve_blocks
from sglang_lite.adapters.cpu.recurrent_plan import CpuRecurrentPlan
from sglang_lite.adapters.recurrent import RecurrentBatch, RecurrentPlan

_BLOCK_TOKENS = 64
"""Tokens of a block with one decay a token: the triangular systems grow with it, the number of sequential steps with
its inverse."""

_CHANNEL_BLOCK_TOKENS = 16
"""The same with a decay per channel, where every pair of tokens of a block costs dk exponentials."""

_SOLVED_ELEMENTS = 1 << 23
"""Elements of the keys that are worked on at a time: bounds the memory that a long chunk needs."""

_NORM_EPSILON = 1e-6


class CpuRecurrent:
    """See ``adapters.recurrent.RecurrentOperations``."""

    def plan(self, batch: RecurrentBatch) -> CpuRecurrentPlan:
        """Indices of a step.

        Raises:
            OperationInputError: columns of different lengths, a row twice, or a decode row that starts a sequence.
        """
        return CpuRecurrentPlan(batch)

    def causal_conv(self, x: Tensor, weight: Tensor, state: Tensor, plan: RecurrentPlan) -> Tensor:
        """[T, C] -> [T, C]: silu of each channel's convolution with the tokens before; moves the tails on."""
        plan = _checked(plan, x)
        if state.shape[1:] != (x.shape[1], weight.shape[1] - 1):
            raise OperationInputError(
                f"the state {list(state.shape)} does not fit an input of {x.shape[1]} channels and a weight "
                f"{list(weight.shape)}; it must be [rows, channels, taps - 1]"
            )
        weight = weight.float()
        if not plan.has_prefill:
            return _convolve_decode(x, weight, state, plan)
        chunks = _convolve_chunks(x[plan.num_decode :], weight, state, plan)
        if not plan.num_decode:
            return chunks
        return torch.cat([_convolve_decode(x[: plan.num_decode], weight, state, plan), chunks])

    def gated_delta(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        state: Tensor,
        plan: RecurrentPlan,
    ) -> Tensor:
        """[T, Hk, dk] twice, [T, Hv, dv] -> [T, Hv, dv]; moves the states on."""
        plan = _checked(plan, value)
        num_heads, num_decode = value.shape[1], plan.num_decode
        if state.shape[1:] != (num_heads, key.shape[2], value.shape[2]) or num_heads % key.shape[1]:
            raise OperationInputError(
                f"the state {list(state.shape)} does not fit keys {list(key.shape)} and values {list(value.shape)}; "
                f"it must be [rows, value heads, key size, value size], and the key heads divide the value heads"
            )
        query = _normalized(query, num_heads) * key.shape[-1] ** -0.5
        columns = (query, _normalized(key, num_heads), value.float(), _with_channels(log_decay), beta.float())
        output = torch.empty(value.shape, dtype=torch.float32, device=value.device)
        if num_decode:
            output[:num_decode] = _decode([column[:num_decode] for column in columns], state, plan)
        if plan.has_prefill:
            output[num_decode:] = _run_chunks([column[num_decode:] for column in columns], state, plan)
        return output.to(value.dtype)


def _checked(plan: RecurrentPlan, x: Tensor) -> CpuRecurrentPlan:
    if not isinstance(plan, CpuRecurrentPlan):
        raise TypeError(f"the plan must come from plan() of these operations, not {type(plan).__name__}")
    if x.shape[0] != plan.num_tokens:
        raise OperationInputError(f"{x.shape[0]} tokens came for a plan of {plan.num_tokens}")
    return plan


def _convolve_decode(x: Tensor, weight: Tensor, state: Tensor, plan: CpuRecurrentPlan) -> Tensor:
    window = torch.cat([state.index_select(0, plan.decode_rows), x.unsqueeze(-1)], dim=-1)
    state.index_copy_(0, plan.decode_rows, window[..., 1:])
    return functional.silu((window.float() * weight).sum(-1)).to(x.dtype)


def _convolve_chunks(x: Tensor, weight: Tensor, state: Tensor, plan: CpuRecurrentPlan) -> Tensor:
    """All chunks as one sequence, each behind its tail, so that no chunk is padded and none needs a loop."""
    num_taps, num_chunks = weight.shape[1], len(plan.prefill_rows)
    index = plan.convolution(num_taps)
    tails = state.index_select(0, plan.prefill_rows).masked_fill_(plan.fresh.view(-1, 1, 1), 0)
    inputs = torch.empty(len(x) + num_chunks * (num_taps - 1), x.shape[1], dtype=x.dtype)
    inputs.index_copy_(0, index.tails_in, tails.transpose(1, 2).reshape(-1, x.shape[1]))
    inputs.index_copy_(0, index.oldest + (num_taps - 1), x)
    left = inputs.index_select(0, index.tails_out).view(num_chunks, num_taps - 1, -1)
    state.index_copy_(0, plan.prefill_rows, left.transpose(1, 2))
    total = torch.zeros(x.shape, dtype=torch.float32)
    for tap in range(num_taps):
        total.addcmul_(inputs.index_select(0, index.oldest + tap).float(), weight[:, tap])
    return functional.silu(total).to(x.dtype)


def _normalized(x: Tensor, num_heads: int) -> Tensor:
    """[T, Hk, dk] -> float32[T, Hv, dk] of length 1, each key head repeated for its value heads."""
    x = x.float()
    x = x * (x.square().sum(-1, keepdim=True) + _NORM_EPSILON).rsqrt()
    repeats = num_heads // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def _with_channels(log_decay: Tensor) -> Tensor:
    return log_decay.float().unsqueeze(-1) if log_decay.dim() == 2 else log_decay.float()


def _decode(columns: list[Tensor], state: Tensor, plan: CpuRecurrentPlan) -> Tensor:
    span = plan.decode_span
    if span is None:
        states = state.index_select(0, plan.decode_rows)
        output = decode_step(states, *columns)
        state.index_copy_(0, plan.decode_rows, states)
        return output
    states = state.narrow(0, span.first, span.count)
    if span.places is None:
        return decode_step(states, *columns)
    # Rows between that are not in the step get a decay of 1 and a correction of 0: they stay what they are.
    spread = [column.new_zeros(span.count, *column.shape[1:]) for column in columns]
    for wide, column in zip(spread, columns, strict=True):
        wide.index_copy_(0, span.places, column)
    return decode_step(states, *spread).index_select(0, span.places)


def _run_chunks(columns: list[Tensor], state: Tensor, plan: CpuRecurrentPlan) -> Tensor:
    key, value, log_decay = columns[1], columns[2], columns[3]
    index = plan.blocks(_BLOCK_TOKENS if log_decay.shape[-1] == 1 else _CHANNEL_BLOCK_TOKENS)
    rows = plan.prefill_rows[plan.longest_first]
    states = state.index_select(0, rows)
    states.masked_fill_(plan.fresh[plan.longest_first].view(-1, 1, 1, 1), 0)
    blocks = [_in_blocks(column, index.places, index.num_blocks, index.size) for column in columns]
    output = value.new_empty(index.num_blocks, value.shape[1], index.size, value.shape[2])
    max_blocks = _SOLVED_ELEMENTS // (key.shape[1] * key.shape[2] * index.size)
    for group in index.groups(max_blocks):
        chosen = torch.cat(group)
        solved = solve_blocks(*(column.index_select(0, chosen) for column in blocks))
        start = 0
        for step in group:  # the only part that goes from block to block
            stop = start + len(step)
            output.index_copy_(0, step, solved.advance(slice(start, stop), states[: len(step)]))
            start = stop
    state.index_copy_(0, rows, states)
    return output.transpose(1, 2).flatten(0, 1).index_select(0, index.places)


def _in_blocks(column: Tensor, places: Tensor, num_blocks: int, size: int) -> Tensor:
    """[P, H, ...] -> [blocks, H, size, ...], zero where no token lies."""
    padded = column.new_zeros(num_blocks * size, *column.shape[1:])
    padded.index_copy_(0, places, column)
    return padded.view(num_blocks, size, *column.shape[1:]).transpose(1, 2)
