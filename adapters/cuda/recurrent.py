"""Recurrent layers on CUDA: the convolution by ``sgl_kernel``, the gated delta rule in torch.

The wheels hold no CUDA kernel for the delta rule; torch's own products compute it in blocks, as on the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cpu.recurrent import CpuRecurrent
from sglang_lite.adapters.cpu.recurrent_plan import BlockIndex, CpuRecurrentPlan
from sglang_lite.adapters.cuda.wheels import Wheels
from sglang_lite.adapters.recurrent import RecurrentBatch, RecurrentPlan

TAPS = (2, 3, 4)
"""Widths that the convolution is compiled for."""

NO_SLOT = -1
"""Row index that the kernels skip; the plans hold none."""


class CudaRecurrentPlan(CpuRecurrentPlan):
    """Indices of a step on the device, made once a step and never inside a captured graph.

    Attributes:
        decode_slots: int32[num_decode], prefill_slots: int32[F], rows of the state pool.
        query_starts: int32[F + 1], where each chunk starts among the tokens of all chunks, and where the last ends.
        has_state: bool[F], whether a chunk goes on from its row's state.
    """

    def __init__(self, batch: RecurrentBatch, device: torch.device) -> None:
        super().__init__(batch)
        self._device = device
        lengths = torch.tensor([0, *batch.query_lens[batch.num_decode :]], dtype=torch.int32)
        self.query_starts = lengths.cumsum(0, dtype=torch.int32).to(device)
        self.decode_slots = self.decode_rows.to(device, torch.int32)
        self.prefill_slots = self.prefill_rows.to(device, torch.int32)
        self.has_state = (~self.fresh).to(device)
        self.decode_rows = self.decode_rows.to(device)
        self.prefill_rows = self.prefill_rows.to(device)
        self.fresh = self.fresh.to(device)
        self.longest_first = self.longest_first.to(device)
        if self.decode_span is not None and self.decode_span.places is not None:
            self.decode_span = replace(self.decode_span, places=self.decode_span.places.to(device))
        self._device_blocks: dict[int, BlockIndex] = {}

    def blocks(self, max_size: int) -> BlockIndex:
        """Blocks of at most ``max_size`` tokens, indices on the device."""
        if max_size not in self._device_blocks:
            index = super().blocks(max_size)
            self._device_blocks[max_size] = BlockIndex(
                index.size,
                index.places.to(self._device),
                index.num_blocks,
                [step.to(self._device) for step in index.order],
            )
        return self._device_blocks[max_size]


class CudaRecurrent:
    """See ``adapters.recurrent.RecurrentOperations``."""

    def __init__(self, wheels: Wheels, device: torch.device) -> None:
        self._kernels: Any = wheels.sgl_kernel
        self._device = device
        self._delta_rule = CpuRecurrent()

    def plan(self, batch: RecurrentBatch) -> CudaRecurrentPlan:
        """Indices of a step. Raises as on the host."""
        return CudaRecurrentPlan(batch, self._device)

    def causal_conv(self, x: Tensor, weight: Tensor, state: Tensor, plan: RecurrentPlan) -> Tensor:
        """[T, C] -> [T, C]; one launch for the decode rows and one for the chunks. Moves the tails on."""
        if not isinstance(plan, CudaRecurrentPlan):
            raise TypeError(f"the plan must come from plan() of these operations, not {type(plan).__name__}")
        taps = weight.shape[1]
        if taps not in TAPS or x.shape != (plan.num_tokens, weight.shape[0]):
            raise OperationInputError(
                f"the convolution takes 2 to 4 taps and [{plan.num_tokens}, {weight.shape[0]}] tokens of this plan, "
                f"got {taps} taps and {list(x.shape)}"
            )
        if state.shape[1:] != (x.shape[1], taps - 1) or not x.dtype == weight.dtype == state.dtype:
            raise OperationInputError(
                f"the state must be [rows, {x.shape[1]}, {taps - 1}] of {x.dtype} as input and weight, got "
                f"{list(state.shape)} of {state.dtype} and a weight of {weight.dtype}"
            )
        parts = []
        if plan.num_decode:
            parts.append(self._convolve_decode(x[: plan.num_decode], weight, state, plan))
        if plan.has_prefill:
            parts.append(self._convolve_chunks(x[plan.num_decode :], weight, state, plan))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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
        if not isinstance(plan, CudaRecurrentPlan):
            raise TypeError(f"the plan must come from plan() of these operations, not {type(plan).__name__}")
        return self._delta_rule.gated_delta(query, key, value, log_decay, beta, state, plan)

    def _convolve_decode(self, x: Tensor, weight: Tensor, state: Tensor, plan: CudaRecurrentPlan) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format).unsqueeze(-1)  # the kernel writes over its input
        self._kernels.causal_conv1d_update(
            x=out,
            conv_state=state,
            weight=weight,
            bias_=None,
            silu_activation=True,
            cache_seqlens=None,
            conv_state_indices=plan.decode_slots,
            pad_slot_id=NO_SLOT,
        )
        return out.squeeze(-1)

    def _convolve_chunks(self, x: Tensor, weight: Tensor, state: Tensor, plan: CudaRecurrentPlan) -> Tensor:
        channels_first = x.t().clone(memory_format=torch.contiguous_format)
        self._kernels.causal_conv1d_fwd(
            x=channels_first,
            weight=weight,
            bias_=None,
            conv_states=state,
            query_start_loc=plan.query_starts,
            cache_indices=plan.prefill_slots,
            has_initial_state=plan.has_state,
            silu_activation=True,
            pad_slot_id=NO_SLOT,
        )
        return channels_first.t().contiguous()
