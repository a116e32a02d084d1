"""A draft head's pass on an accelerator (``execution.draft_head.HeadPass``). Its steps are not captured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.execution.device import Device
from sglang_lite.execution.device_inputs import InputBuffers, whole_plan
from sglang_lite.execution.kv_pool import allocate_kv_pool
from sglang_lite.execution.streams import PlanGate
from sglang_lite.models.draft_head import DraftHead
from sglang_lite.scheduler.plan import StepPlan
from sglang_lite.types import Int32Array, Int64Array

_FIRST_INPUTS = 1 << 14
"""int32 elements of the input buffers at first; a larger step makes them grow."""


class DeviceHeadPass:
    """Queues the head's passes on the stream of the runner that calls it. Owns the head's pool.

    Args:
        ops: those that the head was loaded with, and nobody else's: the planner keeps what the kernels need.
        geometry: of the head's pool as the scheduler sees it; like the served model's it has a scratch page behind it.
    """

    def __init__(self, head: DraftHead, ops: CudaOperations, device: Device, geometry: KVGeometry) -> None:
        self._head = head
        self._ops = ops
        self._device = device
        self._page_size = geometry.page_size
        self._pool = allocate_kv_pool(replace(geometry, num_pages=geometry.num_pages + 1), device.torch_device)
        self._inputs = InputBuffers(device, _FIRST_INPUTS)
        self._gate = PlanGate(device)

    def upload(self, values: Int64Array) -> Tensor:
        """See ``HeadPass.upload``."""
        return self._device.upload(np.ascontiguousarray(values))

    def copy_pages(self, copies: Int32Array) -> None:
        """See ``HeadPass.copy_pages``."""
        pairs = self._device.upload(np.ascontiguousarray(copies.T, dtype=np.int64))
        self._ops.copy_pages(self._pool, pairs[0], pairs[1])

    def forward(self, plan: StepPlan, token_ids: Tensor, previous: Tensor) -> Tensor:
        """See ``HeadPass.forward``."""
        inputs = self._inputs.stage(whole_plan(plan), self._page_size, np.empty(0, dtype=np.int32))
        self._inputs.upload()
        self._gate.enter()
        attention = self._ops.planner.plan(inputs.paged)
        self._gate.leave()
        return self._head.forward(token_ids, previous, inputs.paged.positions.device.long(), self._pool, attention)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See ``HeadPass.logits``."""
        return self._head.logits(hidden)
