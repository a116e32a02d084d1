"""Quantized weights and 8-bit keys and values on an accelerator, over the host's stand-ins for device and kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.capability import CapabilityRecord, capability_record
from sglang_lite.adapters.cuda.quantized import CudaQuantized
from sglang_lite.adapters.cuda.quantized_experts import BlockExperts
from sglang_lite.adapters.device_facts import DeviceFacts
from sglang_lite.adapters.kernel_lines import installed_kernels as wheels_of
from sglang_lite.adapters.quantized import QuantizedLinear, QuantizedWeight
from sglang_lite.config import ServerConfig
from sglang_lite.execution.build import build_executor
from sglang_lite.execution.build_device import build_device_runner
from sglang_lite.execution.device_executor import DeviceExecutor
from sglang_lite.execution.device_requirements import select_providers
from sglang_lite.models.description import read_description
from sglang_lite.types import NO_ADAPTER, StartupError
from tests.support.host_device import HostDevice
from tests.support.kernel_doubles.everything import installed_everything
from tests.support.quantized_checkpoints import FORMATS, quantize_checkpoint
from tests.support.step_plans import PlanMaker, PlannedSequence
from tests.support.tiny_adapters import merge_adapter, write_adapter
from tests.support.tiny_checkpoints import CASES, TinyCase, save_checkpoint

WHEELS = {"sglang-kernel": "0.4.10", "flashinfer-python": "0.7.2"}
PROMPT = [5, 17, 99, 3, 64, 8, 120]
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint(TinyCase("Llama", {**SHAPE, "initializer_range": 0.1}), directory)
    return directory


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with installed_everything("sglang-kernel"):
        yield


def record() -> CapabilityRecord:
    return capability_record(DeviceFacts(0, "Some Device", (9, 0), 80 << 30, 132), wheels_of(WHEELS.get))


def device_tokens(model: Path, **options: Any) -> list[int]:
    config = ServerConfig(model_path=str(model), device="cuda", max_running_requests=4, **options)
    built = build_device_runner(config, read_description(model), model, HostDevice(), record())
    executor = DeviceExecutor(built.runner)
    maker = PlanMaker(built.limits.geometry.page_size, built.limits.geometry.num_pages)
    sequence = PlannedSequence(0)
    tokens = []
    executor.submit(maker.plan([], [(sequence, PROMPT)]))
    tokens += executor.collect().tokens.tolist()
    for _ in range(3):
        executor.submit(maker.plan([sequence]))
        tokens += executor.collect().tokens.tolist()
    executor.close()
    return tokens


def host_tokens(model: Path) -> list[int]:
    config = ServerConfig(model_path=str(model), device="cpu", max_total_tokens=64)
    executor, limits = build_executor(config, read_description(model))
    maker = PlanMaker(limits.geometry.page_size, limits.geometry.num_pages)
    sequence = PlannedSequence(0)
    tokens = []
    executor.submit(maker.plan([], [(sequence, PROMPT)]))
    tokens += executor.collect().tokens.tolist()
    for _ in range(3):
        executor.submit(maker.plan([sequence]))
        tokens += executor.collect().tokens.tolist()
    executor.close()
    return tokens


@pytest.mark.parametrize(
    ("name", "kept"), [("fp8_blocks_128", 4), ("compressed_fp8_channel", 4), ("compressed_int8", 4), ("awq", 0)]
)
def test_quantized_checkpoints(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kept: int
) -> None:
    """Formats with a product stay quantized; those without are dequantized, on the way in."""
    quantize_checkpoint(source, tmp_path / "packed", tmp_path / "plain", FORMATS[name])
    expected = host_tokens(tmp_path / "plain")
    packed: list[QuantizedWeight] = []
    real = CudaQuantized.pack_linear

    def pack_linear(self: CudaQuantized, weight: QuantizedWeight, bias: Tensor | None) -> QuantizedLinear:
        packed.append(weight)
        return real(self, weight, bias)

    monkeypatch.setattr(CudaQuantized, "pack_linear", pack_linear)
    tokens = device_tokens(tmp_path / "packed")
    assert len(packed) == kept
    # The kernels round activations too, so that a later token may differ where two are nearly as likely.
    assert tokens[0] == expected[0]
    if not kept:
        assert tokens == expected


def test_experts_in_blocks_stay_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1, "initializer_range": 0.1}
    case = CASES["qwen3_moe"]
    save_checkpoint(TinyCase(case.family, {**case.options, **shape}), tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "packed", tmp_path / "plain", FORMATS["fp8_blocks_128"])
    expected = host_tokens(tmp_path / "plain")
    packed: list[BlockExperts] = []
    real = BlockExperts.__init__

    def init(self: BlockExperts, *arguments: Any) -> None:
        packed.append(self)
        real(self, *arguments)

    monkeypatch.setattr(BlockExperts, "__init__", init)
    assert device_tokens(tmp_path / "packed")[0] == expected[0]
    assert len(packed) == 1


def test_adapters_on_a_device(source: Path, tmp_path: Path) -> None:
    """Captured steps serve the base model; a row with an adapter takes its step through it, the others not."""
    adapter = write_adapter(tmp_path / "a", source, seed=1)
    merged = merge_adapter(source, adapter, tmp_path / "merged", scaling=2.0)
    base, adapted = host_tokens(source), host_tokens(merged)
    assert base != adapted
    config = ServerConfig(
        model_path=str(source), device="cuda", max_running_requests=4, lora_paths=[f"a={adapter}"], dtype="bfloat16"
    )
    built = build_device_runner(config, read_description(source), source, HostDevice(), record())
    assert [named.name for named in built.adapters] == ["a"]
    executor = DeviceExecutor(built.runner)
    executor.load_adapter(2, str(adapter)).result()
    maker = PlanMaker(built.limits.geometry.page_size, built.limits.geometry.num_pages)
    sequences = [PlannedSequence(0), PlannedSequence(1)]
    slots = np.array([NO_ADAPTER, 2], np.int32)
    rows = []
    executor.submit(replace(maker.plan([], [(sequence, PROMPT) for sequence in sequences]), adapter_slots=slots))
    rows.append(executor.collect().tokens.tolist())
    executor.submit(replace(maker.plan(sequences), adapter_slots=slots))
    rows.append(executor.collect().tokens.tolist())
    executor.close()
    assert [list(column) for column in zip(*rows, strict=True)] == [base[:2], adapted[:2]]


def test_latent_rows_of_eight_bits_are_refused(tmp_path: Path) -> None:
    save_checkpoint(CASES["deepseek_v3"], tmp_path)
    description = read_description(tmp_path)
    with pytest.raises(StartupError, match=r"DeepseekV3ForCausalLM keeps latent rows.*--kv-cache-dtype auto"):
        select_providers(record(), description, torch.bfloat16, torch.float8_e4m3fn)
    select_providers(record(), description, torch.bfloat16, torch.bfloat16)
