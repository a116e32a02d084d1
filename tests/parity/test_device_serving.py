"""The whole engine over an accelerator's stand-in, kernels doubled: the answers of the engine on the host.

Scheduler, page pool, prefix cache, executor threads, captured steps and sampling are the real ones. The doubles compute
in float32 here, so that rounding does not decide between two tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_lite import Engine
from sglang_lite.adapters.capability import CapabilityRecord
from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.execution import build, build_device
from sglang_lite.execution.device_runner import DeviceRunner
from sglang_lite.frontend.request import GenerateRequest, PromptVectors
from sglang_lite.types import SamplingParams
from tests.support.host_device import HostDevice
from tests.support.in_process_engine import InProcessEngine, write_character_tokenizer
from tests.support.kernel_doubles import HOPPER
from tests.support.kernel_doubles.capture import is_recording
from tests.support.kernel_doubles.checks import Precision
from tests.support.kernel_doubles.everything import installed_everything
from tests.support.tiny_checkpoints import CASES, COMMON, save_checkpoint

PROMPTS = [[5, 6, 7, 8, 9] * 4, [40, 41], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 60, 61], [9] * 11, list(range(10, 50))]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True},
    {"temperature": 0, "max_new_tokens": 30, "stop_token_ids": [17, 33, 77, 101]},
    {"temperature": 0.9, "sampling_seed": 11, "top_p": 0.9, "max_new_tokens": 24, "ignore_eos": True},
    {"temperature": 0, "frequency_penalty": 0.6, "repetition_penalty": 1.2, "max_new_tokens": 16, "ignore_eos": True},
    {"temperature": 0, "logit_bias": {"20": 5.0}, "min_new_tokens": 9, "max_new_tokens": 12},
]
WAYS: dict[str, dict[str, Any]] = {
    "captured": {},
    "launched": {"disable_cuda_graph": True},
    "side by side": {"enable_pdmux": True},
    "without overlap": {"disable_overlap_schedule": True},
    "small chunks": {"chunked_prefill_size": 8},
    "little memory": {"max_total_tokens": 128},
    "guesses": {"speculative_algorithm": "NGRAM"},
}


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_checkpoint(CASES[request.param], directory)
    return directory


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDevice]:
    """Where ``--device cuda`` leads in these tests."""
    opened = HostDevice()
    record = CapabilityRecord(90, "sglang-kernel", True, {}, {})
    monkeypatch.setattr("sglang_lite.startup.resolve_device", lambda name: name)
    monkeypatch.setattr(build, "resolve_device", lambda name: name)
    monkeypatch.setattr(build_device, "open_cuda_device", lambda config, rank: (opened, record))
    monkeypatch.setattr(build_device, "device_dtype", lambda *arguments: torch.float32)
    monkeypatch.setattr(build_device, "device_kv_dtype", lambda *arguments: torch.float32)
    monkeypatch.setattr(build_device, "select_providers", lambda *arguments: HOPPER)
    # The operations are asked for bfloat16, which the kernels serve, and get float32, which their doubles take.
    monkeypatch.setattr(build_device, "CudaOperations", lambda on, selection, dtype: CudaOperations(on, selection))
    monkeypatch.setattr("sglang_lite.adapters.cuda.moe.is_capturing", is_recording)
    monkeypatch.setattr(Precision, "allow_float32", True)
    with installed_everything("sglang-kernel"):
        yield opened


def answers(model: Path, device: str, **options: Any) -> list[list[int]]:
    """Two rounds: the second finds the prompts of the first in the prefix cache."""
    settings = {"max_total_tokens": 1024, "max_running_requests": 4, "page_size": 4, "random_seed": 1, **options}
    with Engine(model_path=str(model), device=device, skip_tokenizer_init=True, **settings) as engine:
        found = []
        for order in (slice(None), slice(None, None, -1)):
            results = engine.generate(input_ids=PROMPTS[order], sampling_params=SAMPLINGS[order])
            found += [result["output_ids"] for result in results]
        engine._core._scheduler.audit()
        assert (device == "cuda") is isinstance(engine._core._executor._runner, DeviceRunner)
    return found


@pytest.mark.parametrize("way", sorted(WAYS))
def test_answers_are_those_of_the_host(
    model: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    verified: list[int] = []
    real = DeviceRunner._verify

    def verify(self: DeviceRunner, plan: Any, *arguments: Any) -> Any:
        verified.append(int(plan.draft_lens.sum()))
        return real(self, plan, *arguments)

    monkeypatch.setattr(DeviceRunner, "_verify", verify)
    host_options = {name: value for name, value in WAYS[way].items() if name == "max_total_tokens"}
    assert answers(model, "cuda", **WAYS[way]) == answers(model, "cpu", **host_options)
    assert (device.captures > 0) is (way != "launched")
    assert (sum(verified) > 0) is (way == "guesses")
    assert ("wait on prefill" in device.log) is (way == "side by side")


async def outputs_of(model: Path, vectors: list[np.ndarray], device: str, **options: Any) -> list[list[int]]:
    """Answers to prompts of vectors, and of tokens between them, in one batch."""
    settings = {"max_total_tokens": 1024, "max_running_requests": 8, "page_size": 4, **options}
    engine = InProcessEngine(model, device=device, **settings)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
    given = [PromptVectors(rows) for rows in vectors]
    requests = [GenerateRequest(request_id=f"v{i}", embeds=rows, sampling=sampling) for i, rows in enumerate(given)]
    requests += [GenerateRequest(request_id=f"t{i}", input_ids=ids, sampling=sampling) for i, ids in enumerate(PROMPTS)]

    async def last(request: GenerateRequest) -> list[int]:
        return [output.output_ids async for output in engine.generate(request)][-1]

    try:
        return list(await asyncio.gather(*map(last, requests)))
    finally:
        engine.close()


@pytest.mark.parametrize("way", ["captured", "side by side", "small chunks", "little memory"])
async def test_prompts_of_vectors_are_answered_as_on_the_host(model: Path, device: HostDevice, way: str) -> None:
    write_character_tokenizer(model, COMMON["vocab_size"])
    noise = np.random.default_rng(3)
    vectors = [noise.normal(size=(length, COMMON["hidden_size"])).astype(np.float32) for length in (21, 3, 12)]
    assert await outputs_of(model, vectors, "cuda", **WAYS[way]) == await outputs_of(model, vectors, "cpu")
    assert device.captures > 0
