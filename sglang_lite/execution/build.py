"""From a configuration to an executor that is ready to run plans."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.adapters.capability import resolve_device
from sglang_lite.config import ServerConfig
from sglang_lite.execution.base import AdaptingExecutor, Executor, RankLostError
from sglang_lite.execution.executor import Reloader, StepRunner, TorchExecutor
from sglang_lite.execution.memory_saver import MemorySaver
from sglang_lite.execution.warm_up import warm_up
from sglang_lite.layers.parallel import SINGLE, ParallelGroup
from sglang_lite.models.adapter_settings import NamedAdapter
from sglang_lite.models.description import ModelDescription
from sglang_lite.models.model_description import KVDescription
from sglang_lite.models.repository import resolve_model_path
from sglang_lite.types import StartupError

DEFAULT_MAX_RUNNING_REQUESTS = 256
"""Rows of the request table when ``--max-running-requests`` is not set."""


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
    from sglang_lite.execution.build_host import build_host_runner

    return build_host_runner(config, description, directory, report, parallel)


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
