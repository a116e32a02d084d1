"""Builds the parts of a core with a real model. Imports torch: for the core process and the offline engine only."""

from __future__ import annotations

from sglang_lite.config import ServerConfig
from sglang_lite.engine.grammars import grammar_library
from sglang_lite.engine.info import EngineInfo, KvCacheInfo, RecurrentStateInfo
from sglang_lite.engine.parts import CoreParts, Report, make_scheduler
from sglang_lite.execution.build import EngineLimits, build_executor
from sglang_lite.execution.parallel_executor import ParallelExecutor
from sglang_lite.execution.transfer_memory import transfer_memory
from sglang_lite.models.description import ModelDescription, read_description
from sglang_lite.types import StartupError


def build_core_parts(config: ServerConfig, report: Report) -> CoreParts:
    """Load the model and allocate the pool as a prepared configuration says.

    Raises:
        StartupError: the model, its weights or the memory cannot be served.
    """
    if config.model_path is None:
        raise StartupError("no model: --model-path is not set")
    description = read_description(config.model_path, config.json_model_override_args)
    executor, limits = build_executor(config, description, directory=config.model_path, report=report)
    info = engine_info(config, description, limits)
    depth = 1 if config.disable_overlap_schedule else 2
    scheduler = make_scheduler(config, info)
    grammars = grammar_library(config, info.vocab_size, info.eos_token_ids)
    memory = transfer_memory(limits, description, size=config.tp_size)
    if isinstance(executor, ParallelExecutor):
        ranks = executor.ranks
        return CoreParts(scheduler, executor, info, depth, executor.watch, grammars, memory=memory, ranks=ranks)
    return CoreParts(scheduler, executor, info, depth, grammars=grammars, memory=memory)


def engine_info(config: ServerConfig, description: ModelDescription, limits: EngineLimits) -> EngineInfo:
    """The facts that the front needs, from the model and the pool that was allocated."""
    geometry = limits.geometry
    max_total_tokens = geometry.num_pages * geometry.page_size
    return EngineInfo(
        context_length=limits.context_length,
        vocab_size=description.vocab_size,
        eos_token_ids=description.eos_token_ids,
        num_pages=geometry.num_pages,
        page_size=geometry.page_size,
        max_total_tokens=max_total_tokens,
        max_req_input_len=min(limits.context_length, max_total_tokens),
        max_running_requests=limits.max_running_requests,
        kv_cache=KvCacheInfo(
            dtype=limits.kv_dtype,
            page_size=geometry.page_size,
            num_layers=geometry.num_layers,
            kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            kv_tensors_per_token=geometry.num_tensors,
            bytes_per_token=geometry.bytes_per_token,
            page_size_bytes=geometry.page_bytes,
        ),
        model_type=description.model_type,
        architectures=(description.architecture,),
        dtype=limits.dtype,
        device=config.device,
        weight_bytes=limits.weight_bytes,
        startup_seconds=limits.startup_seconds,
        recurrent_state=_recurrent_state(description, limits),
    )


def _recurrent_state(description: ModelDescription, limits: EngineLimits) -> RecurrentStateInfo | None:
    recurrent = description.recurrent
    if recurrent is None:
        return None
    return RecurrentStateInfo(
        num_layers=recurrent.num_layers,
        conv_elements=recurrent.tail_elements,
        state_elements=recurrent.state_elements,
        bytes_per_request=limits.row_state_bytes,
        pool_bytes=limits.row_state_bytes * limits.max_running_requests,
    )
