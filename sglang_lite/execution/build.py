"""From a configuration to an executor that is ready to run plans."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.adapters.capability import resolve_device
from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.config import ServerConfig
from sglang_lite.execution.base import AdaptingExecutor, Executor, RankLostError
from sglang_lite.execution.context_length import served_context_length
from sglang_lite.execution.executor import Reloader, StepRunner, TorchExecutor
from sglang_lite.execution.memory import WORKSPACE_SHARE, available_memory, plan_kv_budget
from sglang_lite.execution.memory_saver import MemorySaver
from sglang_lite.execution.model_adapters import ModelAdapters
from sglang_lite.execution.model_runner import ModelRunner
from sglang_lite.execution.recurrent_limits import RowBudget, plan_rows
from sglang_lite.execution.reload import ModelReloader
from sglang_lite.execution.warm_up import warm_up
from sglang_lite.layers.parallel import SINGLE, ParallelGroup
from sglang_lite.models.adapter_settings import NamedAdapter, adapter_bytes, adapter_settings
from sglang_lite.models.base import CausalLanguageModel
from sglang_lite.models.description import ModelDescription
from sglang_lite.models.families import FAMILIES
from sglang_lite.models.model_description import KVDescription
from sglang_lite.models.registry import expected_tensors, load_model
from sglang_lite.models.repository import resolve_model_path
from sglang_lite.models.share import share_of
from sglang_lite.types import StartupError

if TYPE_CHECKING:
    from sglang_lite.execution.build_draft import DraftPlan, HeadPlan

DEFAULT_MAX_RUNNING_REQUESTS = 256
"""Rows of the request table when ``--max-running-requests`` is not set."""

_DTYPES = {
    "auto": torch.float32,
    "float": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the executor was built with.

    Attributes:
        geometry: of the KV pool.
        context_length: most tokens of a sequence.
        max_running_requests: rows of the request table.
        dtype, kv_dtype: names as in the configuration ("float32", "bfloat16").
        weight_bytes: of the model's parameters.
        startup_seconds: phase -> seconds.
        row_state_bytes: recurrent state of one request; 0 for models without.
        pool: the KV pool, as long as it stays where it is; None where memory may be given back.
    """

    geometry: KVGeometry
    context_length: int
    max_running_requests: int
    dtype: str
    kv_dtype: str
    weight_bytes: int
    startup_seconds: dict[str, float]
    row_state_bytes: int = 0
    pool: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A model runner of one rank, before its first step.

    Attributes:
        num_threads: of one operation of the thread that runs it.
        adapters: to load at the start, into the first slots.
        reloader: replaces the weights, None where that cannot be done.
        saver: gives memory back, None without ``--enable-memory-saver``.
    """

    runner: StepRunner
    limits: EngineLimits
    num_threads: int
    adapters: tuple[NamedAdapter, ...] = ()
    reloader: Reloader | None = None
    saver: MemorySaver | None = None


def build_executor(
    config: ServerConfig,
    description: ModelDescription,
    *,
    directory: Path | str | None = None,
    report: Callable[[str, float], None] = lambda message, fraction: None,
) -> tuple[Executor, EngineLimits]:
    """Check the device, load the weights, allocate the pool, run a first step; with the other ranks, if there are any.

    Args:
        config: of the server.
        description: of the model in ``config.model_path``.
        directory: where the model lies; default: ``config.model_path`` resolved.
        report: called with (message, fraction done).

    Raises:
        StartupError: device, dtype, checkpoint or capacity cannot be served, or another rank failed.
    """
    if directory is None:
        directory = resolve_model_path(config.model_path or "", revision=config.revision)
    executor: Executor
    if config.tp_size > 1:
        from sglang_lite.execution.parallel_executor import start_ranks

        executor, built = start_ranks(
            config, lambda group: build_runner(config, description, directory, report, group), _executor_of
        )
    else:
        built = build_runner(config, description, directory, report)
        executor = _executor_of(built)
    for slot, adapter in enumerate(built.adapters):
        report(f"loading adapter {adapter.name}", 0.85)
        _load_adapter(executor, slot, adapter)
    report("warming up", 0.9)
    started = time.monotonic()
    try:
        warm_up(executor, built.limits.geometry, built.limits.context_length)
    except RankLostError as error:
        executor.close()
        raise StartupError(str(error)) from error
    seconds = {**built.limits.startup_seconds, "first_step": time.monotonic() - started}
    return executor, replace(built.limits, startup_seconds=seconds)


def build_runner(
    config: ServerConfig,
    description: ModelDescription,
    directory: Path | str,
    report: Callable[[str, float], None] = lambda message, fraction: None,
    parallel: ParallelGroup = SINGLE,
) -> BuiltRunner:
    """What one rank runs: its share of the weights, and of every page of the pool.

    Raises:
        StartupError: device, dtype, checkpoint or capacity cannot be served.
    """
    if resolve_device(config.device) == "cuda":
        from sglang_lite.execution.build_device import build_device_runner, open_cuda_device

        device, record = open_cuda_device(config, parallel.rank)
        return build_device_runner(config, description, directory, device, record, report, parallel)
    dtype = _dtype("--dtype", config.dtype)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else _dtype("--kv-cache-dtype", config.kv_cache_dtype)
    num_threads = max(1, _num_threads() // (parallel.size // config.nnodes))
    started = time.monotonic()
    weight_bytes = _weight_bytes(description, dtype)
    context_length = served_context_length(config, description, selects_keys=True)
    settings = adapter_settings(config)
    draft = _draft_plan(config, description, directory, parallel)
    draft_bytes = draft.weight_bytes(dtype) if draft is not None else 0
    memory = _plan_host_memory(config, description, dtype, kv_dtype, context_length, draft, parallel)
    ops, geometry, rows = memory.ops, memory.geometry, memory.rows
    report("loading weights", 0.1)
    canonical_name = FAMILIES[description.architecture].canonical_name
    adapters = ModelAdapters(ops, settings, canonical_name, dtype) if settings is not None else None

    def load(path: Path | str) -> CausalLanguageModel:
        return load_on_host(
            path,
            ops,
            dtype,
            context_length,
            num_threads,
            overrides=config.json_model_override_args,
            parallel=parallel,
            adapters=adapters,
        )

    model = load(directory)
    guesses = None
    if draft is not None:
        report("loading the draft model", 0.7)
        guesses = draft.load_on_host(
            geometry,
            vocabulary=description.vocab_size,
            dtype=dtype,
            num_rows=rows.num_rows,
            context_length=context_length,
            num_threads=num_threads,
            workspace_bytes=memory.draft_workspace_bytes,
            parallel=parallel,
            target=model,
        )
    seconds = {"load": time.monotonic() - started}
    runner = ModelRunner(
        model,
        ops,
        geometry,
        num_rows=rows.num_rows,
        seed=config.random_seed,
        parallel=parallel,
        adapters=adapters,
        draft=guesses,
    )
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    limits = EngineLimits(
        geometry,
        context_length,
        rows.num_rows,
        names[dtype],
        names[kv_dtype],
        weight_bytes + draft_bytes,
        seconds,
        rows.row_bytes,
        None if config.enable_memory_saver else runner.pool,
    )
    reloader: Reloader | None = None
    saver: MemorySaver | None = None
    if parallel.size == 1 and settings is None and not config.drafts_with_head:
        reloader = ModelReloader(
            description,
            config.json_model_override_args,
            weight_bytes,
            load,
            runner,
        )
        saver = MemorySaver(runner, ops, reloader, str(directory)) if config.enable_memory_saver else None
    return BuiltRunner(runner, limits, num_threads, settings.adapters if settings is not None else (), reloader, saver)


@dataclass(frozen=True, slots=True)
class _HostMemory:
    """What the host's memory is used for beside weights; ``ops`` owns the workspace of decode attention."""

    ops: CpuOperations
    geometry: KVGeometry
    rows: RowBudget
    draft_workspace_bytes: int


def _plan_host_memory(
    config: ServerConfig,
    description: ModelDescription,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    context_length: int,
    draft: DraftPlan | HeadPlan | None,
    parallel: ParallelGroup,
) -> _HostMemory:
    """The request table, the pool and the workspaces that fit beside the weights, before any of it is allocated."""
    share = share_of(description, parallel.size)
    # Ranks and replicas on the host share its memory; elsewhere each has a device.
    available = (
        available_memory() // (parallel.size * config.dp_size) - _weight_bytes(description, dtype) // parallel.size
    )
    if (settings := adapter_settings(config)) is not None:
        available -= adapter_bytes(settings, expected_tensors(description), dtype.itemsize)
    available = max(0, available - (draft.weight_bytes(dtype) if draft is not None else 0))
    rows = plan_rows(
        config,
        share.recurrent,
        activation_bytes=dtype.itemsize,
        available_bytes=available,
        default_rows=DEFAULT_MAX_RUNNING_REQUESTS,
    )
    draft_token_bytes = draft.bytes_per_token(kv_dtype, config.page_size) if draft is not None else 0
    token_bytes = kv_geometry(share.kv, 1, 1, kv_dtype).bytes_per_token + draft_token_bytes
    budget = plan_kv_budget(
        config,
        token_bytes,
        available - rows.state_bytes,
        context_length,
        workspace_share=WORKSPACE_SHARE if share.kv.num_tensors > 1 else 0.0,
    )
    draft_workspace = budget.workspace_bytes * draft_token_bytes // token_bytes
    ops = CpuOperations(workspace_bytes=budget.workspace_bytes - draft_workspace)
    num_pages = _agree_on_pages(budget.num_pages, parallel, ops.device)
    return _HostMemory(ops, kv_geometry(share.kv, num_pages, config.page_size, kv_dtype), rows, draft_workspace)


def _executor_of(built: BuiltRunner) -> TorchExecutor:
    """One that launches ahead where the device runs beside the host."""
    from sglang_lite.execution.device_executor import DeviceExecutor
    from sglang_lite.execution.device_runner import DeviceRunner

    if isinstance(built.runner, DeviceRunner):
        return DeviceExecutor(built.runner)
    return TorchExecutor(built.runner, num_threads=built.num_threads, reloader=built.reloader, saver=built.saver)


def _load_adapter(executor: Executor, slot: int, adapter: NamedAdapter) -> None:
    if not isinstance(executor, AdaptingExecutor):
        raise StartupError(f"adapter {adapter.name!r}: this executor takes no adapters")
    try:
        executor.load_adapter(slot, adapter.path).result()
    except StartupError as error:
        executor.close()
        raise StartupError(f"--lora-paths: adapter {adapter.name!r}: {error}") from error


def kv_geometry(kv: KVDescription, num_pages: int, page_size: int, dtype: torch.dtype) -> KVGeometry:
    """The pool for what a token leaves in it."""
    latent_width = kv.value_width if kv.num_tensors == 1 else 0
    return KVGeometry(
        num_pages, page_size, kv.num_layers, kv.num_kv_heads, kv.key_width, dtype, kv.num_tensors, latent_width
    )


def _agree_on_pages(num_pages: int, parallel: ParallelGroup, device: torch.device) -> int:
    """The pages of the rank that has least room: one page table serves all ranks."""
    if parallel.size == 1:
        return num_pages
    return int(parallel.all_gather(torch.tensor([num_pages], dtype=torch.int64, device=device), 0).min())


def _draft_plan(
    config: ServerConfig, description: ModelDescription, directory: Path | str, parallel: ParallelGroup
) -> DraftPlan | HeadPlan | None:
    if not config.drafts_with_weights:
        return None
    from sglang_lite.execution.build_draft import draft_plan

    return draft_plan(config, description, directory, parallel)


def load_on_host(
    directory: Path | str,
    ops: CpuOperations,
    dtype: torch.dtype,
    context_length: int,
    num_threads: int,
    *,
    overrides: Mapping[str, Any] | None = None,
    parallel: ParallelGroup = SINGLE,
    adapters: ModelAdapters | None = None,
) -> CausalLanguageModel:
    """Load the model in a thread that ends.

    Every thread that runs parallel operations gets a pool of its own from OpenMP, which goes with it. While more pool
    threads exist than processors, none of them spins between two operations, and each operation pays for waking the
    others; with the executor's pool the only one, a decode step of one row was measured a few percent shorter.
    """

    def load() -> CausalLanguageModel:
        torch.set_num_threads(num_threads)  # counts for the calling thread
        model, _ = load_model(
            directory,
            ops=ops,
            dtype=dtype,
            overrides=overrides,
            context_length=context_length,
            progress=parallel.rank == 0,
            parallel=parallel,
            adapters=adapters.slots if adapters is not None else None,
        )
        return model

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load") as threads:
        return threads.submit(load).result()


def _dtype(flag: str, name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise StartupError(f"{flag} {name} is not supported with --device cpu; allowed: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _weight_bytes(description: ModelDescription, dtype: torch.dtype) -> int:
    return sum(math.prod(shape) for shape in expected_tensors(description).values()) * dtype.itemsize


def _num_threads() -> int:
    """Processors this process may use, or fewer when ``OMP_NUM_THREADS`` says so."""
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
