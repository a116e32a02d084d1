"""A real engine core process without a model: the chain model's successor table drives a null executor.

Run as ``python -m tests.unit.engine.null_core [milliseconds a step]``.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from sglang_lite.config import ServerConfig
from sglang_lite.engine import process
from sglang_lite.engine.info import EngineInfo, KvCacheInfo
from sglang_lite.engine.parts import CoreParts, Report, make_scheduler
from sglang_lite.models.description import read_description
from sglang_lite.scheduler.plan import StepOutput
from sglang_lite.types import StartupError
from tests.support.chain_model import successors
from tests.support.null_executor import NullExecutor

FAULT = "fault"
REFUSAL = "refusal"


class SlowExecutor(NullExecutor):
    """Takes a fixed time for every step."""

    seconds = 0.0

    def collect(self) -> StepOutput:
        """The oldest result, after its time."""
        if self.seconds:
            time.sleep(self.seconds)
        return super().collect()


def info_of(config: ServerConfig) -> EngineInfo:
    description = read_description(str(config.model_path))
    num_pages = (config.max_total_tokens or 65536) // config.page_size
    return EngineInfo(
        context_length=config.context_length or description.context_length,
        vocab_size=description.vocab_size,
        eos_token_ids=description.eos_token_ids,
        num_pages=num_pages,
        page_size=config.page_size,
        max_total_tokens=num_pages * config.page_size,
        max_req_input_len=num_pages * config.page_size,
        max_running_requests=config.max_running_requests or 64,
        kv_cache=KvCacheInfo(
            dtype="float32",
            page_size=config.page_size,
            num_layers=1,
            kv_heads=2,
            head_dim=64,
            kv_tensors_per_token=2,
            bytes_per_token=1024,
            page_size_bytes=1024 * config.page_size,
        ),
        model_type="qwen3",
        architectures=("Qwen3ForCausalLM",),
        dtype="float32",
        device="cpu",
    )


def build(config: ServerConfig, report: Report) -> CoreParts:
    """Parts with a null executor."""
    mode = sys.argv[1] if len(sys.argv) > 1 else "0"
    if mode == REFUSAL:
        raise StartupError("the weights are made of cheese")
    info = info_of(config)
    report("pretending to load", 0.5)
    executor = SlowExecutor(info.max_running_requests, successor=successors().astype(np.int32))
    scheduler = make_scheduler(config, info)
    if mode == FAULT:
        scheduler.commit = None  # type: ignore[method-assign,assignment] # a fault of the scheduler, on purpose
    else:
        executor.seconds = float(mode) / 1000
    return CoreParts(scheduler, executor, info, depth=1 if config.disable_overlap_schedule else 2)


if __name__ == "__main__":
    sys.exit(process.main(build))
