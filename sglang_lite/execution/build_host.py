"""From a configuration to a runner on the host's processors: what fits, the weights, the pool."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.config import ServerConfig
from sglang_lite.execution.build import DEFAULT_MAX_RUNNING_REQUESTS, BuiltRunner, EngineLimits, kv_geometry
from sglang_lite.execution.context_length import served_context_length
from sglang_lite.execution.memory import WORKSPACE_SHARE, available_memory, plan_kv_budget
from sglang_lite.execution.memory_saver import MemorySaver
from sglang_lite.execution.model_adapters import ModelAdapters
from sglang_lite.execution.model_runner import ModelRunner
from sglang_lite.execution.recurrent_limits import RowBudget, plan_rows
from sglang_lite.execution.reload import ModelReloader
from sglang_lite.layers.parallel import SINGLE, ParallelGroup
from sglang_lite.models.adapter_settings import adapter_bytes, adapter_settings
from sglang_lite.models.base import CausalLanguageModel
from sglang_lite.models.description import ModelDescription
from sglang_lite.models.families import FAMILIES
from sglang_lite.models.registry import expected_tensors, load_model
from sglang_lite.models.share import share_of
from sglang_lite.types import StartupError

if TYPE_CHECKING:
    from sglang_lite.execution.build_draft import DraftPlan, HeadPlan

_DTYPES = {
    "auto": torch.float32,
    "float": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def build_host_runner(
    config: ServerConfig,
    description: ModelDescription,
    directory: Path | str,
    report: Callable[[str, float], None],
    parallel: ParallelGroup,
) -> BuiltRunner:
    """See ``build.build_runner``."""
    started = time.monotonic()
    plan = _plan(config, description, directory, parallel)
    memory, settings = plan.memory, adapter_settings(config)
    report("loading weights", 0.1)
    canonical_name = FAMILIES[description.architecture].canonical_name
    adapters = ModelAdapters(memory.ops, settings, canonical_name, plan.dtype) if settings is not None else None

    def load(path: Path | str) -> CausalLanguageModel:
        return load_on_host(
            path,
            memory.ops,
            plan.dtype,
            plan.context_length,
            plan.num_threads,
            overrides=config.json_model_override_args,
            parallel=parallel,
            adapters=adapters,
        )

    model = load(directory)
    guesses = None
    if plan.draft is not None:
        report("loading the draft model", 0.7)
        guesses = plan.draft.load_on_host(
            memory.geometry,
            vocabulary=description.vocab_size,
            dtype=plan.dtype,
            num_rows=memory.rows.num_rows,
            context_length=plan.context_length,
            num_threads=plan.num_threads,
            workspace_bytes=memory.draft_workspace_bytes,
            parallel=parallel,
            target=model,
        )
    seconds = {"load": time.monotonic() - started}
    runner = ModelRunner(
        model,
        memory.ops,
        memory.geometry,
        num_rows=memory.rows.num_rows,
        seed=config.random_seed,
        parallel=parallel,
        adapters=adapters,
        draft=guesses,
    )
    limits = plan.limits(seconds, None if config.enable_memory_saver else runner.pool)
    reloader: ModelReloader | None = None
    saver: MemorySaver | None = None
    if parallel.size == 1 and settings is None and not config.drafts_with_head:
        reloader = ModelReloader(description, config.json_model_override_args, plan.weight_bytes, load, runner)
        saver = MemorySaver(runner, memory.ops, reloader, str(directory)) if config.enable_memory_saver else None
    loaded = settings.adapters if settings is not None else ()
    return BuiltRunner(runner, limits, plan.num_threads, loaded, reloader, saver)


@dataclass(frozen=True, slots=True)
class _HostMemory:
    """What the host's memory is used for beside weights; ``ops`` owns the workspace of decode attention."""

    ops: CpuOperations
    geometry: KVGeometry
    rows: RowBudget
    draft_workspace_bytes: int


@dataclass(frozen=True, slots=True)
class _HostPlan:
    """What a rank will be, before anything is loaded."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_threads: int
    weight_bytes: int
    context_length: int
    draft: DraftPlan | HeadPlan | None
    memory: _HostMemory

    def limits(self, seconds: dict[str, float], pool: torch.Tensor | None) -> EngineLimits:
        """What the executor is told."""
        draft_bytes = self.draft.weight_bytes(self.dtype) if self.draft is not None else 0
        return EngineLimits(
            self.memory.geometry,
            self.context_length,
            self.memory.rows.num_rows,
            _NAMES[self.dtype],
            _NAMES[self.kv_dtype],
            self.weight_bytes + draft_bytes,
            seconds,
            self.memory.rows.row_bytes,
            pool,
        )


def _plan(
    config: ServerConfig, description: ModelDescription, directory: Path | str, parallel: ParallelGroup
) -> _HostPlan:
    """Raises StartupError for what the host cannot serve."""
    dtype = _dtype("--dtype", config.dtype)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else _dtype("--kv-cache-dtype", config.kv_cache_dtype)
    context_length = served_context_length(config, description, selects_keys=True)
    draft = _draft_plan(config, description, directory, parallel)
    return _HostPlan(
        dtype,
        kv_dtype,
        max(1, _num_threads() // (parallel.size // config.nnodes)),
        _weight_bytes(description, dtype),
        context_length,
        draft,
        _plan_host_memory(config, description, dtype, kv_dtype, context_length, draft, parallel),
    )


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
