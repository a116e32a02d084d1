"""From a configuration to a runner on an accelerator: what fits, what is captured, the first steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.adapters.capability import CapabilityRecord, capability_record, require_bfloat16
from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.adapters.cuda.selection import dtype_name
from sglang_lite.adapters.device_facts import read_driver
from sglang_lite.adapters.kernel_lines import installed_kernels
from sglang_lite.config import ServerConfig
from sglang_lite.execution.base import Executor
from sglang_lite.execution.build import DEFAULT_MAX_RUNNING_REQUESTS, BuiltRunner, EngineLimits, kv_geometry
from sglang_lite.execution.build_device_draft import DeviceDraft, DeviceDraftHead
from sglang_lite.execution.build_draft import HeadPlan, draft_plan
from sglang_lite.execution.context_length import served_context_length
from sglang_lite.execution.cuda_device import CudaDevice
from sglang_lite.execution.device import Device
from sglang_lite.execution.device_memory import graph_batch_sizes, kv_bytes, plan_pages, static_fraction
from sglang_lite.execution.device_requirements import device_dtype, device_kv_dtype, select_providers
from sglang_lite.execution.device_runner import DeviceRunner
from sglang_lite.execution.draft_model import Drafter
from sglang_lite.execution.model_adapters import ModelAdapters
from sglang_lite.execution.placement import placement_of
from sglang_lite.execution.recurrent_limits import RowBudget, plan_rows
from sglang_lite.execution.warm_up import warm_up
from sglang_lite.layers.parallel import SINGLE, ParallelGroup
from sglang_lite.models.adapter_settings import adapter_settings
from sglang_lite.models.base import CausalLanguageModel
from sglang_lite.models.description import ModelDescription
from sglang_lite.models.families import FAMILIES
from sglang_lite.models.registry import expected_tensors, load_model
from sglang_lite.models.share import share_of
from sglang_lite.scheduler.plan import StepOutput, StepPlan
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

Report = Callable[[str, float], None]


def open_cuda_device(config: ServerConfig, rank: int) -> tuple[CudaDevice, CapabilityRecord]:
    """The device of a rank, and what it and the installed wheels can do.

    Raises:
        StartupError: there is no such device, or it does not compute in bfloat16.
    """
    ordinal = placement_of(config).device_of(rank)
    devices = read_driver().devices
    if ordinal >= len(devices):
        raise StartupError(
            f"device ordinal {ordinal} for rank {rank}: the CUDA driver shows {len(devices)} devices; see "
            f"--base-gpu-id, --gpu-id-step and CUDA_VISIBLE_DEVICES"
        )
    require_bfloat16(devices[ordinal].compute_capability)
    return CudaDevice(ordinal), capability_record(devices[ordinal], installed_kernels())


def build_device_runner(
    config: ServerConfig,
    description: ModelDescription,
    directory: Path | str,
    device: Device,
    record: CapabilityRecord,
    report: Report = lambda message, fraction: None,
    parallel: ParallelGroup = SINGLE,
) -> BuiltRunner:
    """Load the model, allocate the pool from what is left, run the first steps, capture the decode batches.

    Args:
        record: what the device and the wheels can do.

    Raises:
        StartupError: something the model needs is not served (everything at once), or does not fit.
    """
    started = time.monotonic()
    if config.enable_pdmux and parallel.size > 1:
        raise StartupError(
            f"--enable-pdmux with --tp-size {parallel.size}: one communicator does not serve two streams; use either"
        )
    setting = _setting(config, description, device, record)
    settings = adapter_settings(config)
    model, adapters = _load_weights(config, description, directory, setting, parallel, report)
    draft = _load_draft(config, description, directory, setting, parallel, model, report)
    loaded = time.monotonic()
    draft_page_bytes = 0
    if isinstance(draft, DeviceDraftHead):
        draft_page_bytes = draft.page_bytes(config.page_size, setting.dtype, setting.kv_dtype)
    elif draft is not None:
        draft_page_bytes = draft.page_bytes(config.page_size, setting.kv_dtype)
    geometry, rows, batch_sizes = _plan_memory(
        config, description, device, setting.dtype, setting.kv_dtype, parallel, draft_page_bytes
    )
    steps = _Steps(geometry, rows.num_rows, setting.context_length, batch_sizes, not config.disable_cuda_graph_padding)
    runner = DeviceRunner(
        model,
        setting.ops,
        device,
        geometry,
        num_rows=steps.num_rows,
        context_length=steps.context_length,
        batch_sizes=steps.batch_sizes,
        pad_graphs=steps.pad_graphs,
        side_by_side=config.enable_pdmux,
        seed=config.random_seed,
        parallel=parallel,
        adapters=adapters,
        draft=_guesses(draft, steps, setting, description, parallel, report),
    )
    _first_steps(runner, geometry, setting.context_length, report)
    seconds = {"load": loaded - started, "capture": time.monotonic() - loaded}
    limits = EngineLimits(
        geometry,
        setting.context_length,
        rows.num_rows,
        dtype_name(setting.dtype),
        dtype_name(setting.kv_dtype),
        _weight_bytes(description, draft, setting.dtype),
        seconds,
        rows.row_bytes,
        runner.pool,
    )
    return BuiltRunner(runner, limits, 1, settings.adapters if settings is not None else ())


@dataclass(frozen=True, slots=True)
class _Setting:
    """What a model runs on, and in which types."""

    device: Device
    record: CapabilityRecord
    ops: CudaOperations
    dtype: torch.dtype
    kv_dtype: torch.dtype
    context_length: int


@dataclass(frozen=True, slots=True)
class _Steps:
    """What steps are made for, and which of them are captured."""

    geometry: KVGeometry
    num_rows: int
    context_length: int
    batch_sizes: tuple[int, ...]
    pad_graphs: bool


def _setting(config: ServerConfig, description: ModelDescription, device: Device, record: CapabilityRecord) -> _Setting:
    dtype = device_dtype(config, description)
    kv_dtype = device_kv_dtype(config, dtype)
    ops = CudaOperations(device.torch_device, select_providers(record, description, dtype, kv_dtype), dtype=dtype)
    context_length = served_context_length(config, description, selects_keys=ops.latent.selects_keys)
    return _Setting(device, record, ops, dtype, kv_dtype, context_length)


def _load_weights(
    config: ServerConfig,
    description: ModelDescription,
    directory: Path | str,
    setting: _Setting,
    parallel: ParallelGroup,
    report: Report,
) -> tuple[CausalLanguageModel, ModelAdapters | None]:
    settings = adapter_settings(config)
    canonical_name = FAMILIES[description.architecture].canonical_name
    adapters = None
    if settings is not None:
        adapters = ModelAdapters(setting.ops, settings, canonical_name, setting.dtype)
    report("loading weights", 0.1)
    with setting.device.activate():
        model, _ = load_model(
            directory,
            ops=setting.ops,
            dtype=setting.dtype,
            overrides=config.json_model_override_args,
            context_length=setting.context_length,
            progress=parallel.rank == 0,
            parallel=parallel,
            adapters=adapters.slots if adapters is not None else None,
        )
        setting.device.synchronize()
    return model, adapters


def _load_draft(
    config: ServerConfig,
    description: ModelDescription,
    directory: Path | str,
    setting: _Setting,
    parallel: ParallelGroup,
    model: CausalLanguageModel,
    report: Report,
) -> DeviceDraft | DeviceDraftHead | None:
    planned = draft_plan(config, description, directory, parallel)
    if planned is None:
        return None
    types = setting.dtype, setting.kv_dtype, setting.context_length
    if isinstance(planned, HeadPlan):
        report("loading the draft head", 0.4)
        return DeviceDraftHead.load(planned, model, setting.device, setting.record, *types)
    report("loading the draft model", 0.4)
    return DeviceDraft.load(planned, setting.device, setting.record, *types)


def _guesses(
    draft: DeviceDraft | DeviceDraftHead | None,
    steps: _Steps,
    setting: _Setting,
    description: ModelDescription,
    parallel: ParallelGroup,
    report: Report,
) -> Drafter | None:
    """What guesses tokens, its own steps captured."""
    if draft is None:
        return None
    if isinstance(draft, DeviceDraftHead):
        return draft.guesses(steps.geometry, steps.num_rows, setting.dtype)
    runner = draft.runner(
        steps.geometry,
        num_rows=steps.num_rows,
        context_length=steps.context_length,
        batch_sizes=steps.batch_sizes,
        pad_graphs=steps.pad_graphs,
    )
    if runner is not None:
        _first_steps(runner, steps.geometry, steps.context_length, report)
    return draft.guesses(runner, description.vocab_size, parallel)


def _weight_bytes(
    description: ModelDescription, draft: DeviceDraft | DeviceDraftHead | None, dtype: torch.dtype
) -> int:
    weight_bytes = sum(math.prod(shape) for shape in expected_tensors(description).values()) * dtype.itemsize
    return weight_bytes + (draft.plan.weight_bytes(dtype) if draft is not None else 0)


def _plan_memory(
    config: ServerConfig,
    description: ModelDescription,
    device: Device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    parallel: ParallelGroup,
    draft_page_bytes: int,
) -> tuple[KVGeometry, RowBudget, tuple[int, ...]]:
    """The pool, the rows of the request table and the decode batches to capture, once the weights are loaded."""
    memory = device.memory()
    sizes = graph_batch_sizes(config, memory.total, config.max_running_requests or DEFAULT_MAX_RUNNING_REQUESTS)
    fraction = static_fraction(config, memory.total, sizes[-1] if sizes else 0)
    budget = kv_bytes(memory, fraction)
    rows = plan_rows(
        config,
        share_of(description, parallel.size).recurrent,
        activation_bytes=dtype.itemsize,
        available_bytes=budget,
        default_rows=DEFAULT_MAX_RUNNING_REQUESTS,
    )
    kv = share_of(description, parallel.size).kv
    page_bytes = kv_geometry(kv, 1, config.page_size, kv_dtype).page_bytes + draft_page_bytes
    num_pages = plan_pages(config, page_bytes, budget - rows.state_bytes, memory, fraction)
    if parallel.size > 1:  # one page table serves all ranks: the one with least room decides
        pages = torch.tensor([num_pages], dtype=torch.int64, device=device.torch_device)
        num_pages = int(parallel.all_gather(pages, 0).min())
    sizes = tuple(size for size in sizes if size <= rows.num_rows)
    logger.info(
        "device memory: %.1f of %.1f GiB free beside the weights, static share %.3f, %d pages of %d tokens",
        memory.free / 2**30,
        memory.total / 2**30,
        fraction,
        num_pages,
        config.page_size,
    )
    return kv_geometry(kv, num_pages, config.page_size, kv_dtype), rows, sizes


def _first_steps(runner: DeviceRunner, geometry: KVGeometry, context_length: int, report: Report) -> None:
    """Both kinds of steps once, which teaches the planner the layers; then the graphs."""
    report("first steps", 0.6)
    warm_up(_InPlace(runner), geometry, context_length)
    runner.capture(lambda size: report(f"capturing decode batches of {size}", 0.7))


class _InPlace(Executor):
    """Runs plans where they are submitted: every rank does this on its own, before plans are sent around."""

    def __init__(self, runner: DeviceRunner) -> None:
        self._runner = runner
        self._outputs: list[StepOutput] = []

    @property
    def in_flight(self) -> int:
        """Results not taken yet."""
        return len(self._outputs)

    def submit(self, plan: StepPlan) -> None:
        """Run it."""
        self._outputs.append(self._runner.run(plan))

    def collect(self) -> StepOutput:
        """Its result."""
        return self._outputs.pop(0)

    def close(self) -> None:
        """Nothing to end."""
