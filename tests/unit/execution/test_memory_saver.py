"""What a runner has released is gone: no reference keeps it alive, and what comes back computes the same."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_lite import Engine
from sglang_lite.execution.model_runner import ModelRunner
from sglang_lite.types import StartupError
from tests.support.tiny_checkpoints import CASES, save_checkpoint

PROMPTS = [[5, 6, 7, 8, 9] * 6, [40, 41], list(range(10, 50))]
SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "deepseek_v2", "gemma3"])
def test_released_tensors_are_freed(tmp_path: Path, family: str) -> None:
    save_checkpoint(CASES[family], tmp_path)
    gc.collect()
    # Engines that other tests of this process keep are not this one's.
    others = {id(found) for found in gc.get_objects() if type(found) is torch.Tensor}
    options: dict[str, Any] = {"page_size": 4, "max_total_tokens": 512, "max_running_requests": 4}
    with Engine(
        model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True, enable_memory_saver=True, **options
    ) as engine:
        executor = engine._core._executor

        def answers() -> list[list[int]]:
            results = engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)
            return [result["output_ids"] for result in results]

        expected = answers()
        runner: ModelRunner = executor._runner
        pool, weights = weakref.ref(runner.pool), weakref.ref(runner._model)
        tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor and id(found) not in others]
        kept = [weakref.ref(found) for found in tensors]
        del tensors
        before = sum(tensor.nbytes for ref in kept if (tensor := ref()) is not None)
        assert engine._core._scheduler.flush()
        executor.release_memory(("kv_cache", "weights")).result()
        gc.collect()
        assert pool() is None and weights() is None
        left = sum(tensor.nbytes for ref in kept if (tensor := ref()) is not None)
        assert left < 1024 < before
        executor.resume_memory(("kv_cache", "weights")).result()
        assert answers() == expected


def test_an_executor_without_a_saver_says_so(tmp_path: Path) -> None:
    save_checkpoint(CASES["llama"], tmp_path)
    with Engine(model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True, max_total_tokens=64) as engine:
        for call in (engine._core._executor.release_memory, engine._core._executor.resume_memory):
            with pytest.raises(StartupError, match="--enable-memory-saver"):
                call(("weights",)).result()
