"""From a configuration to a runner on an accelerator: what fits, what is captured, the first steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
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
    dtype = device_dtype(config, description)
    kv_dtype = device_kv_dtype(config, dtype)
    selection = select_providers(record, description, dtype, kv_dtype)
    ops = CudaOperations(device.torch_device, selection, dtype=dtype)
    context_length = served_context_length(config, description, selects_keys=ops.latent.selects_keys)
    settings = adapter_settings(config)
    canonical_name = FAMILIES[description.architecture].canonical_name
    adapters = ModelAdapters(ops, settings, canonical_name, dtype) if settings is not None else None
    report("loading weights", 0.1)
    with device.activate():
        model, _ = load_model(
            directory,
            ops=ops,
            dtype=dtype,
            overrides=config.json_model_override_args,
            context_length=context_length,
            progress=parallel.rank == 0,
            parallel=parallel,
            adapters=adapters.slots if adapters is not None else None,
        )
        device.synchronize()
    draft: DeviceDraft | DeviceDraftHead | None = None
    planned = draft_plan(config, description, directory, parallel)
    draft_page_bytes = 0
    if isinstance(planned, HeadPlan):
        report("loading the draft head", 0.4)
        draft = DeviceDraftHead.load(planned, model, device, record, dtype, kv_dtype, context_length)
        draft_page_bytes = draft.page_bytes(config.page_size, dtype, kv_dtype)
    elif planned is not None:
        report("loading the draft model", 0.4)
        draft = DeviceDraft.load(planned, device, record, dtype, kv_dtype, context_length)
        draft_page_bytes = draft.page_bytes(config.page_size, kv_dtype)
    loaded = time.monotonic()
    geometry, rows, batch_sizes = _plan_memory(config, description, device, dtype, kv_dtype, parallel, draft_page_bytes)
    guesses: Drafter | None = None
    if isinstance(draft, DeviceDraftHead):
        guesses = draft.guesses(geometry, rows.num_rows, dtype)
    elif draft is not None:
        draft_runner = draft.runner(
            geometry,
            num_rows=rows.num_rows,
            context_length=context_length,
            batch_sizes=batch_sizes,
            pad_graphs=not config.disable_cuda_graph_padding,
        )
        if draft_runner is not None:
            _first_steps(draft_runner, geometry, context_length, report)
        guesses = draft.guesses(draft_runner, description.vocab_size, parallel)
    runner = DeviceRunner(
        model,
        ops,
        device,
        geometry,
        num_rows=rows.num_rows,
        context_length=context_length,
        batch_sizes=batch_sizes,
        pad_graphs=not config.disable_cuda_graph_padding,
        side_by_side=config.enable_pdmux,
        seed=config.random_seed,
        parallel=parallel,
        adapters=adapters,
        draft=guesses,
    )
    _first_steps(runner, geometry, context_length, report)
    seconds = {"load": loaded - started, "capture": time.monotonic() - loaded}
    weight_bytes = sum(math.prod(shape) for shape in expected_tensors(description).values()) * dtype.itemsize
    weight_bytes += draft.plan.weight_bytes(dtype) if draft is not None else 0
    limits = EngineLimits(
        geometry,
        context_length,
        rows.num_rows,
        dtype_name(dtype),
        dtype_name(kv_dtype),
        weight_bytes,
        seconds,
        rows.row_bytes,
        runner.pool,
    )
    return BuiltRunner(runner, limits, 1, settings.adapters if settings is not None else ())


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
