"""A step's columns on their way to the device: one buffer, one copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.cuda.arena import SECTION_ALIGNMENT, Section, StepArena
from sglang_lite.adapters.cuda.paging import HostBatch, PagedStep, arena_length, page_step
from sglang_lite.execution.device import Device
from sglang_lite.execution.streams import HostRing
from sglang_lite.scheduler.plan import StepPlan
from sglang_lite.types import Int32Array

_NUM_SECTIONS = 4


@dataclass(frozen=True, slots=True)
class PlanPart:
    """Rows of a plan that go through the model together: all of them, or its decode rows or prefill chunks.

    Attributes:
        batch: their columns. input_ids: int32[T]. rows: int32[B].
    """

    batch: HostBatch
    input_ids: Int32Array
    rows: Int32Array


def whole_plan(plan: StepPlan) -> PlanPart:
    """Every row."""
    batch = HostBatch(plan.num_decode, plan.query_lens, plan.kv_lens, plan.page_table)
    return PlanPart(batch, plan.input_ids, plan.rows)


def decode_part(plan: StepPlan) -> PlanPart:
    """The decode rows of a plan."""
    count = plan.num_decode
    batch = HostBatch(count, plan.query_lens[:count], plan.kv_lens[:count], plan.page_table[:count])
    return PlanPart(batch, plan.input_ids[:count], plan.rows[:count])


def prefill_part(plan: StepPlan) -> PlanPart:
    """The prefill chunks of a plan."""
    count = plan.num_decode
    batch = HostBatch(0, plan.query_lens[count:], plan.kv_lens[count:], plan.page_table[count:])
    return PlanPart(batch, plan.input_ids[count:], plan.rows[count:])


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model and the sampler read, on the device once the arena was uploaded.

    Attributes:
        input_ids: int32[T], padding included. rows: int32[B], the first ``num_decode`` of which take their token from
            the step before where ``input_ids`` is negative.
        paged: page metadata; its positions are the tokens' positions.
        sample_tokens, sample_rows: int32[S], the last token of each row that samples, and its row of the request
            table.
    """

    input_ids: Section
    rows: Section
    paged: PagedStep
    sample_tokens: Section
    sample_rows: Section


class InputBuffers:
    """The host and device memory of step inputs.

    Args:
        device: the accelerator.
        length: int32 elements of the buffers; a larger step makes them grow unless ``fixed``.
        fixed: captured graphs read the device buffer, so that it stays where it is.
    """

    def __init__(self, device: Device, length: int, *, fixed: bool = False) -> None:
        self._device = device
        self._fixed = fixed
        self._allocate(length)

    def _allocate(self, length: int) -> None:
        self._ring = HostRing(self._device, length)
        memory = torch.zeros(length, dtype=torch.int32, device=self._device.torch_device)
        self._arena = StepArena(self._ring.take(), memory)

    def fits(self, part: PlanPart, page_size: int) -> bool:
        """Whether a step needs no more than there is."""
        return inputs_length(part, page_size, len(part.rows)) <= self._arena.capacity

    def stage(self, part: PlanPart, page_size: int, sample_index: Int32Array) -> StepInputs:
        """Lay out a step on the host; ``upload`` sends it.

        Args:
            sample_index: int32[S], the rows of the part that sample.
        """
        length = inputs_length(part, page_size, len(sample_index))
        if length > self._arena.capacity and not self._fixed:
            self._allocate(2 * length)
        arena = self._arena
        arena.rewind(self._ring.take())
        batch = part.batch
        num_real = len(part.input_ids)
        input_ids = arena.reserve(batch.num_tokens)
        input_ids.array[:num_real] = part.input_ids
        input_ids.array[num_real:] = 0
        rows = arena.reserve(batch.num_rows)
        rows.array[: len(part.rows)] = part.rows
        rows.array[len(part.rows) :] = 0
        paged = page_step(batch, page_size, arena)
        sample_tokens = arena.reserve(len(sample_index))
        np.subtract(paged.qo_indptr.array[1:][sample_index], np.int32(1), out=sample_tokens.array)
        sample_rows = arena.reserve(len(sample_index))
        sample_rows.array[:] = part.rows[sample_index]
        return StepInputs(input_ids, rows, paged, sample_tokens, sample_rows)

    def upload(self) -> None:
        """Queue the copy of what was staged."""
        self._arena.upload()
        self._ring.queued()


def inputs_length(part: PlanPart, page_size: int, num_samples: int) -> int:
    """Elements that ``stage`` reserves."""
    batch = part.batch
    own = batch.num_tokens + batch.num_rows + 2 * num_samples + _NUM_SECTIONS * SECTION_ALIGNMENT
    return own + arena_length(batch, page_size)


def token_ids(inputs: StepInputs, num_decode: int, last_token: Tensor) -> Tensor:
    """int64[T] on the device: a decode row's token comes from the step before, wherever the plan does not name it.

    Args:
        last_token: int64[rows of the request table].
    """
    ids = inputs.input_ids.device.long()
    if num_decode:
        decode = ids[:num_decode]
        known = last_token.index_select(0, inputs.rows.device[:num_decode])
        decode.copy_(torch.where(decode < 0, known, decode))
    return ids
