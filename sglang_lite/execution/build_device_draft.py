"""The draft model or head on an accelerator: loaded before the pools are sized, run on a pool of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.adapters.capability import CapabilityRecord
from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.execution.build import kv_geometry
from sglang_lite.execution.build_draft import DraftPlan, HeadPlan
from sglang_lite.execution.device import Device
from sglang_lite.execution.device_head import DeviceHeadPass
from sglang_lite.execution.device_requirements import select_providers
from sglang_lite.execution.device_runner import DeviceRunner
from sglang_lite.execution.draft_head import HeadDrafter
from sglang_lite.execution.draft_model import DraftModel
from sglang_lite.layers.parallel import ParallelGroup
from sglang_lite.models.base import CausalLanguageModel
from sglang_lite.models.dense import DenseDecoder
from sglang_lite.models.draft_head import DraftHead, load_draft_head
from sglang_lite.models.registry import load_model


@dataclass(frozen=True, slots=True)
class DeviceDraft:
    """A draft model whose weights are on the device, where they are needed.

    Attributes:
        loaded: the model and the operations it was loaded with; None on a rank that takes rank 0's guesses.
    """

    plan: DraftPlan
    device: Device
    loaded: tuple[CausalLanguageModel, CudaOperations] | None

    @classmethod
    def load(
        cls,
        plan: DraftPlan,
        device: Device,
        record: CapabilityRecord,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        context_length: int,
    ) -> DeviceDraft:
        """Read the weights.

        Raises:
            StartupError: something the model needs is not served, or its checkpoint is not usable.
        """
        if not plan.is_loaded_here:
            return cls(plan, device, None)
        selection = select_providers(record, plan.description, dtype, kv_dtype)
        # Operations of its own: the attention planner keeps what the kernels need from one step to the next.
        ops = CudaOperations(device.torch_device, selection, dtype=dtype)
        with device.activate():
            model, _ = load_model(plan.directory, ops=ops, dtype=dtype, context_length=context_length)
            device.synchronize()
        return cls(plan, device, (model, ops))

    def page_bytes(self, page_size: int, kv_dtype: torch.dtype) -> int:
        """What a page takes beside the served model's."""
        return self.plan.bytes_per_token(kv_dtype, page_size) * page_size

    def runner(
        self,
        geometry: KVGeometry,
        *,
        num_rows: int,
        context_length: int,
        batch_sizes: tuple[int, ...],
        pad_graphs: bool,
    ) -> DeviceRunner | None:
        """What runs it over a pool with the pages of the served model's (``geometry``)."""
        if self.loaded is None:
            return None
        model, ops = self.loaded
        return DeviceRunner(
            model,
            ops,
            self.device,
            self.plan.geometry(geometry),
            num_rows=num_rows,
            context_length=context_length,
            batch_sizes=batch_sizes,
            pad_graphs=pad_graphs,
        )

    def guesses(self, runner: DeviceRunner | None, vocabulary: int, parallel: ParallelGroup) -> DraftModel:
        """What fills plans of a served model with that many tokens; its steps are queued one behind another."""
        return DraftModel(
            runner,
            draft_vocabulary=self.plan.description.vocab_size,
            vocabulary=vocabulary,
            device=self.device.torch_device,
            parallel=parallel,
            launch=None if runner is None else lambda plan: runner.launch(plan).result,
        )


@dataclass(frozen=True, slots=True)
class DeviceDraftHead:
    """A draft head whose weights are on the device."""

    plan: HeadPlan
    device: Device
    head: DraftHead
    ops: CudaOperations

    @classmethod
    def load(
        cls,
        plan: HeadPlan,
        target: CausalLanguageModel,
        device: Device,
        record: CapabilityRecord,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        context_length: int,
    ) -> DeviceDraftHead:
        """Read the weights.

        Raises:
            StartupError: something the head needs is not served, or its checkpoint is not usable.
        """
        if not isinstance(target, DenseDecoder):
            raise TypeError(f"{type(target).__name__} has no place for a draft head")
        selection = select_providers(record, plan.head.decoder, dtype, kv_dtype)
        ops = CudaOperations(device.torch_device, selection, dtype=dtype)
        with device.activate():
            head = load_draft_head(plan.head, target, ops=ops, dtype=dtype, context_length=context_length)
            device.synchronize()
        return cls(plan, device, head, ops)

    def page_bytes(self, page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> int:
        """What a page takes beside the served model's: KV, and a hidden state."""
        head = self.plan.head.decoder
        return kv_geometry(head.kv, 1, page_size, kv_dtype).page_bytes + head.hidden_size * dtype.itemsize

    def guesses(self, geometry: KVGeometry, num_rows: int, dtype: torch.dtype) -> HeadDrafter:
        """What fills plans, over a pool with the pages of the served model's (``geometry``)."""
        with self.device.activate():
            head_pass = DeviceHeadPass(self.head, self.ops, self.device, self.plan.geometry(geometry))
            shape = self.plan.hidden_shape(geometry, num_rows, dtype, self.device.torch_device)
            return HeadDrafter(head_pass, shape)
