"""Captured decode steps: one graph a batch size, smaller batches padded to the next one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan
from sglang_lite.adapters.cuda.attention import AttentionPlanner
from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.adapters.cuda.paging import HostBatch
from sglang_lite.adapters.cuda.wrappers import GraphBuffers
from sglang_lite.execution.device import Device, Graph
from sglang_lite.execution.device_inputs import InputBuffers, PlanPart, StepInputs, inputs_length
from sglang_lite.execution.streams import PlanGate
from sglang_lite.types import Int32Array

Forward = Callable[[StepInputs, AttentionPlan], Tensor]
"""(inputs, plan) -> hidden states [T, hidden], from device memory only."""


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """What is captured.

    Attributes:
        batch_sizes: rising; empty for none.
        max_pages: entries of the page tables of one step together; a step with more runs without a graph.
        scratch_page: page that padding rows write to.
        page_size: tokens of a page.
        pad: whether a batch may run in the graph of a larger one.
    """

    batch_sizes: tuple[int, ...]
    max_pages: int
    scratch_page: int
    page_size: int
    pad: bool = True


def default_batch_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8, of 16 from 64 on and of 32 from 256 on; ``largest`` is always one of them."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 1, 32), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


@dataclass(frozen=True, slots=True)
class _Captured:
    planner: AttentionPlanner
    graph: Graph
    hidden: Tensor


class DecodeGraphs:
    """Captures and replays.

    Args:
        forward: the part of a step that is captured.
        limits: what to capture.
        gate: of the runner; plans of graphs pass it like all others.
    """

    def __init__(
        self, device: Device, ops: CudaOperations, forward: Forward, limits: GraphLimits, gate: PlanGate
    ) -> None:
        self._device = device
        self._ops = ops
        self._forward = forward
        self._limits = limits
        self._gate = gate
        self._captured: dict[int, _Captured] = {}
        if limits.batch_sizes:
            largest = limits.batch_sizes[-1]
            length = inputs_length(self._padding(largest), limits.page_size, largest)
            self._inputs = InputBuffers(device, length, fixed=True)
            self._buffers = _graph_buffers(limits, device.torch_device)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """What is captured so far, rising."""
        return tuple(sorted(self._captured))

    def capture(self, progress: Callable[[int], None] = lambda size: None) -> None:
        """Capture every batch size, the largest first, so that the smaller ones find its memory.

        The model must have run once without a graph: that is when its kinds of attention layers become known.

        Args:
            progress: called with each size before it is captured.
        """
        for size in reversed(self._limits.batch_sizes):
            progress(size)
            planner = self._ops.new_planner(_first_rows(self._buffers, size))
            inputs, plan = self._plan(planner, self._padding(size), np.arange(size, dtype=np.int32))
            run = partial(self._forward, inputs, plan)
            # Once without recording: libraries choose kernels and allocate workspaces on first use.
            run()
            self._device.synchronize()
            graph, hidden = self._device.capture(run)
            self._captured[size] = _Captured(planner, graph, hidden)

    def serves(self, part: PlanPart) -> bool:
        """Whether a step of decode rows has a graph."""
        size = self._size_for(len(part.rows))
        if size is None:
            return False
        page_size = self._limits.page_size
        pages = int((-(-part.batch.kv_lens // page_size)).sum()) + size - len(part.rows)
        return pages <= self._limits.max_pages

    def run(self, part: PlanPart, sample_index: Int32Array) -> tuple[StepInputs, Tensor]:
        """Queue a step that ``serves`` accepted: its inputs and the hidden states [B, hidden] without the padding.

        The states are valid until the next graph is replayed.
        """
        size = self._size_for(len(part.rows))
        if size is None:
            raise ValueError(f"no graph was captured for {len(part.rows)} rows; captured are {self.batch_sizes}")
        captured = self._captured[size]
        batch = replace(part.batch, padded_rows=size, scratch_page=self._limits.scratch_page)
        inputs, _ = self._plan(captured.planner, replace(part, batch=batch), sample_index)
        captured.graph.replay()
        return inputs, captured.hidden[: len(part.rows)]

    def _plan(
        self, planner: AttentionPlanner, part: PlanPart, sample_index: Int32Array
    ) -> tuple[StepInputs, AttentionPlan]:
        inputs = self._inputs.stage(part, self._limits.page_size, sample_index)
        self._inputs.upload()
        self._gate.enter()
        plan = planner.plan(inputs.paged)
        self._gate.leave()
        return inputs, plan

    def _size_for(self, num_rows: int) -> int | None:
        sizes = self._limits.batch_sizes
        place = bisect_left(sizes, num_rows)
        if place == len(sizes) or (sizes[place] != num_rows and not self._limits.pad):
            return None
        return sizes[place] if sizes[place] in self._captured else None

    def _padding(self, size: int) -> PlanPart:
        """A batch of padding rows only, each with one token on the scratch page."""
        ones = np.ones(size, dtype=np.int32)
        batch = HostBatch(
            num_decode=size,
            query_lens=ones,
            kv_lens=ones,
            page_table=np.full((size, 1), self._limits.scratch_page, dtype=np.int32),
            scratch_page=self._limits.scratch_page,
            reserved_pages=self._limits.max_pages,
        )
        zeros = np.zeros(size, dtype=np.int32)
        return PlanPart(batch, zeros, zeros)


def _graph_buffers(limits: GraphLimits, device: torch.device) -> GraphBuffers:
    largest = limits.batch_sizes[-1]

    def zeros(length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.int32, device=device)

    return GraphBuffers(zeros(largest + 1), zeros(largest + 1), zeros(largest), zeros(limits.max_pages))


def _first_rows(buffers: GraphBuffers, size: int) -> GraphBuffers:
    """Graphs of all sizes share the memory, because they never run at the same time."""
    return GraphBuffers(
        buffers.qo_indptr[: size + 1], buffers.kv_indptr[: size + 1], buffers.last_page_len[:size], buffers.kv_indices
    )
