"""Quantized checkpoints load as the values they stand for, and a fault in one is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_lite.adapters.base import Operations
from sglang_lite.adapters.cpu.quantized import CpuQuantized
from sglang_lite.adapters.dequantize import dequantize
from sglang_lite.adapters.moe import SILU, PackedExperts
from sglang_lite.adapters.quantized import AwqWeight, Fp8Weight, QuantizedLinear, QuantizedOperations, QuantizedWeight
from sglang_lite.layers.parallel import ExpertPart
from sglang_lite.models.base import CausalLanguageModel
from sglang_lite.models.checkpoint import Checkpoint
from sglang_lite.models.description import read_description
from sglang_lite.models.load_progress import LoadProgress
from sglang_lite.models.quantization import Mxfp4Scheme, QuantizationDescription
from sglang_lite.models.quantized_experts import read_quantized_experts
from sglang_lite.models.quantized_storage import find_layout
from sglang_lite.models.registry import check_checkpoint, load_model, stored_tensors
from sglang_lite.models.weight_reader import Shard, WeightReader
from sglang_lite.types import StartupError
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import (
    FORMATS,
    Format,
    fp8_blocks,
    mxfp4,
    quantize_checkpoint,
    write_checkpoint,
)
from tests.support.reference_operations import ReferenceOperations
from tests.support.tiny_checkpoints import CASES, TinyCase, save_checkpoint

BLOCKS = Format({"quant_method": "fp8", "weight_block_size": [32, 32]}, lambda weight: fp8_blocks(weight, (32, 32)))
HALVES = Format({"quant_method": "fp8", "weight_block_size": [16, 16]}, lambda weight: fp8_blocks(weight, (16, 16)))
PROMPT = [5, 17, 99, 3, 64, 8, 120, 41, 77, 30]
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "attention_bias": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    save_checkpoint(TinyCase("Llama", SHAPE), directory)
    return directory


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    save_checkpoint(CASES["qwen3_moe"], directory)
    return directory


@pytest.fixture
def awq(source: Path, tmp_path: Path) -> Path:
    quantize_checkpoint(source, tmp_path / "awq", tmp_path / "awq_plain", FORMATS["awq"])
    return tmp_path / "awq"


def logits(directory: Path, ops: Operations | None = None) -> Tensor:
    ops = ops or ReferenceOperations()
    model: CausalLanguageModel = load_model(directory, ops=ops, progress=False)[0]
    runner = PagedRunner(model, ops, page_size=4)
    return runner.step([(runner.new_sequence(), PROMPT)])[0]


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_quantized_checkpoint_equals_the_plain_one_of_its_values(source: Path, tmp_path: Path, name: str) -> None:
    quantize_checkpoint(source, tmp_path / "packed", tmp_path / "plain", FORMATS[name])
    packed = logits(tmp_path / "packed")
    torch.testing.assert_close(packed, logits(tmp_path / "plain"), atol=1e-5, rtol=0)
    assert (packed - logits(source)).abs().max() > 1e-3, "quantizing changes the weights, or nothing was quantized"


def test_a_listed_module_may_stay_plain_and_any_other_too(source: Path, tmp_path: Path) -> None:
    storage = FORMATS["awq"]

    def applies(name: str) -> bool:
        return name.endswith(("q_proj.weight", "down_proj.weight"))

    quantize_checkpoint(source, tmp_path / "packed", tmp_path / "plain", storage, applies)
    torch.testing.assert_close(logits(tmp_path / "packed"), logits(tmp_path / "plain"), atol=1e-5, rtol=0)


class TestFaults:
    """Every fault is a start-up error that names the tensor."""

    @pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
    def test_missing_part(self, awq: Path, part: str) -> None:
        name = f"model.layers.0.mlp.up_proj.{part}"
        rewrite(awq, lambda tensors: tensors.pop(name))
        with pytest.raises(StartupError, match=f"missing checkpoint tensor {name}"):
            logits(awq)

    @pytest.mark.parametrize(
        ("name", "part"),
        [
            ("fp8_blocks_128", "weight_scale_inv"),
            ("fp8_tensor_static", "input_scale"),
            ("compressed_fp8_channel", "weight_scale"),
            ("gptq_reordered", "g_idx"),
            ("compressed_int4_32", "weight_shape"),
            ("compressed_int4_zeros", "weight_zero_point"),
        ],
    )
    def test_missing_part_of_other_formats(self, source: Path, tmp_path: Path, name: str, part: str) -> None:
        quantize_checkpoint(source, tmp_path / "packed", tmp_path / "plain", FORMATS[name])
        missing = f"model.layers.0.self_attn.o_proj.{part}"
        rewrite(tmp_path / "packed", lambda tensors: tensors.pop(missing))
        with pytest.raises(StartupError, match=f"missing checkpoint tensor {missing}"):
            logits(tmp_path / "packed")

    def test_wrong_shape(self, awq: Path) -> None:
        name = "model.layers.0.mlp.up_proj.scales"
        rewrite(awq, lambda tensors: tensors.update({name: tensors[name][:2].clone()}))
        with pytest.raises(StartupError, match=rf"{name} shape \[2, 256\] does not match expected \[4, 256\]"):
            logits(awq)

    def test_wrong_type(self, awq: Path) -> None:
        name = "model.layers.0.mlp.up_proj.qweight"
        rewrite(awq, lambda tensors: tensors.update({name: tensors[name].to(torch.int64)}))
        with pytest.raises(StartupError, match=rf"{name} has dtype I64.*supported weight types: I32"):
            logits(awq)

    def test_group_size_of_another_checkpoint(self, awq: Path) -> None:
        edit_config(awq, group_size=64)
        with pytest.raises(StartupError, match=r"qzeros shape \[4, \d+\] does not match expected \[2, \d+\]"):
            logits(awq)

    def test_group_size_that_does_not_divide(self, awq: Path) -> None:
        edit_config(awq, group_size=48)
        with pytest.raises(StartupError, match=r"q_proj.weight has 128 inputs, which do not divide.*groups of 48"):
            logits(awq)

    def test_scales_that_are_not_numbers(self, awq: Path) -> None:
        name = "model.layers.0.mlp.up_proj.scales"
        rewrite(awq, lambda tensors: tensors[name].view(-1)[3:4].fill_(float("nan")))
        with pytest.raises(StartupError, match=f"{name} holds scales that are not finite"):
            logits(awq)

    def test_groups_out_of_range(self, source: Path, tmp_path: Path) -> None:
        quantize_checkpoint(source, tmp_path / "packed", tmp_path / "plain", FORMATS["gptq_reordered"])
        name = "model.layers.0.self_attn.q_proj.g_idx"
        rewrite(tmp_path / "packed", lambda tensors: tensors[name][:1].fill_(4))
        with pytest.raises(StartupError, match=f"{name} names groups 0 to 4, but there are only groups 0 to 3"):
            logits(tmp_path / "packed")

    def test_stated_shape_of_another_matrix(self, source: Path, tmp_path: Path) -> None:
        quantize_checkpoint(source, tmp_path / "packed", tmp_path / "plain", FORMATS["compressed_int4_32"])
        name = "model.layers.0.self_attn.q_proj.weight_shape"
        rewrite(tmp_path / "packed", lambda tensors: tensors[name].fill_(64))
        with pytest.raises(StartupError, match=rf"{name} says \[64, 64\] where the matrix has shape \[128, 128\]"):
            logits(tmp_path / "packed")

    def test_a_listed_module_must_be_plain(self, awq: Path) -> None:
        edit_config(awq, modules_to_not_convert=["mlp.up_proj"])
        with pytest.raises(StartupError, match=r"missing checkpoint tensor model.layers.0.mlp.up_proj.weight"):
            logits(awq)

    def test_without_quantization_config(self, source: Path, tmp_path: Path) -> None:
        """The bytes of float8 weights are no weights without their scales."""
        quantize_checkpoint(source, tmp_path / "packed", tmp_path / "plain", FORMATS["fp8_blocks_128"])
        shutil.copy(source / "config.json", tmp_path / "packed" / "config.json")
        with pytest.raises(StartupError, match=r"q_proj.weight has dtype F8_E4M3"):
            logits(tmp_path / "packed")


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(changes)
    path.write_text(json.dumps(config))


class TestShards:
    """Ranks that share a quantized matrix hold parts of the values, whatever the blocks and words."""

    @pytest.mark.parametrize("name", ["fp8_blocks_uneven", "awq", "gptq_reordered"])
    @pytest.mark.parametrize("dim", [0, 1])
    def test_parts_make_the_whole(self, source: Path, tmp_path: Path, name: str, dim: int) -> None:
        quantize_checkpoint(source, tmp_path / "packed", tmp_path / "plain", FORMATS[name])
        weight = "model.layers.0.mlp.down_proj.weight"
        expected = load_file(tmp_path / "plain" / "model.safetensors")[weight]
        with open_reader(tmp_path / "packed") as reader:
            parts = [reader.read_merged([weight], Shard(dim, rank, 4)) for rank in range(4)]
        torch.testing.assert_close(torch.cat(parts, dim), expected, atol=1e-6, rtol=0)


def open_reader(directory: Path) -> WeightReader:
    description = read_description(directory)
    checkpoint = check_checkpoint(directory, description)
    quantized = stored_tensors(description, checkpoint).quantized
    bar = LoadProgress(1, enabled=False)
    return WeightReader(checkpoint, torch.float32, torch.device("cpu"), bar, quantized=quantized)


class KeepingQuantized(CpuQuantized):
    """Of a device that has a product for every format but those refused; counts the layers that use it."""

    def __init__(self, refused: type[object] | None = None) -> None:
        self.num_layers = 0
        self.experts: list[tuple[QuantizedWeight, QuantizedWeight]] = []
        self.refused = refused

    def refusal(self, weight: QuantizedWeight) -> str | None:
        return "not on this device" if self.refused is not None and isinstance(weight, self.refused) else None

    def pack_linear(self, weight: QuantizedWeight, bias: Tensor | None) -> QuantizedLinear:
        self.num_layers += 1
        return super().pack_linear(weight, bias)

    def pack_experts(self, w13: QuantizedWeight, w2: QuantizedWeight, **options: Any) -> PackedExperts:
        self.experts.append((w13, w2))
        return super().pack_experts(w13, w2, **options)


class KeepingOperations(ReferenceOperations):
    def __init__(self, quantized: KeepingQuantized) -> None:
        self._kept = quantized

    @property
    def quantized(self) -> QuantizedOperations:
        return self._kept


class TestQuantizedProducts:
    """Where the device has a product for the format, matrices stay as they are stored."""

    @pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"fp8_blocks_uneven"}))  # no product takes such blocks
    def test_layers_stay_quantized(self, source: Path, tmp_path: Path, name: str) -> None:
        quantize_checkpoint(source, tmp_path / "packed", tmp_path / "plain", FORMATS[name])
        kept = KeepingQuantized()
        actual = logits(tmp_path / "packed", KeepingOperations(kept))
        # Query, key and value as one, the output, gate and up as one, down. The key's 64 rows do not end where blocks
        # of 128 do, so that the three are not joined but read as values.
        assert kept.num_layers == (3 if name == "fp8_blocks_128" else 4)
        expected = logits(tmp_path / "plain")
        if "fp8" in name or name == "compressed_int8":  # their products round activations too
            assert 1e-4 < (actual - expected).std() < 0.2 * expected.std()
        else:
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)

    def test_refused_formats_are_read_as_values(self, awq: Path) -> None:
        kept = KeepingQuantized(refused=AwqWeight)
        torch.testing.assert_close(logits(awq, KeepingOperations(kept)), logits(awq))
        assert kept.num_layers == 0


class TestQuantizedExperts:
    """Where the device has grouped products for the format, experts stay as they are stored, in one stack."""

    @pytest.mark.parametrize("name", ["blocks", "compressed_int4_channel", "compressed_fp8_channel", "awq"])
    def test_experts_stay_quantized(self, mixture: Path, tmp_path: Path, name: str) -> None:
        storage = BLOCKS if name == "blocks" else FORMATS[name]
        quantize_checkpoint(mixture, tmp_path / "packed", tmp_path / "plain", storage, lambda name: ".experts." in name)
        kept = KeepingQuantized()
        actual = logits(tmp_path / "packed", KeepingOperations(kept))
        assert len(kept.experts) == 2, "one stack a layer"
        plain = load_file(tmp_path / "plain" / "model.safetensors")
        for layer, (w13, w2) in enumerate(kept.experts):
            prefix = f"model.layers.{layer}.mlp.experts.3."
            gate_up = torch.cat([plain[f"{prefix}gate_proj.weight"], plain[f"{prefix}up_proj.weight"]])
            torch.testing.assert_close(dequantize(w13)[3], gate_up)
            torch.testing.assert_close(dequantize(w2)[3], plain[f"{prefix}down_proj.weight"])
        torch.testing.assert_close(actual, logits(tmp_path / "plain"), atol=1e-4, rtol=0)

    def test_refused_experts_are_read_as_values(self, mixture: Path, tmp_path: Path) -> None:
        quantize_checkpoint(mixture, tmp_path / "packed", tmp_path / "plain", BLOCKS, lambda name: ".experts." in name)
        kept = KeepingQuantized(refused=Fp8Weight)
        torch.testing.assert_close(logits(tmp_path / "packed", KeepingOperations(kept)), logits(tmp_path / "plain"))
        assert not kept.experts

    @pytest.mark.parametrize("rank", [0, 1])
    def test_the_part_of_a_rank(self, mixture: Path, tmp_path: Path, rank: int) -> None:
        """Experts 4 to 7, and half of their width."""
        quantize_checkpoint(mixture, tmp_path / "packed", tmp_path / "plain", HALVES, lambda name: ".experts." in name)
        plain = load_file(tmp_path / "plain" / "model.safetensors")
        ops = KeepingOperations(KeepingQuantized())
        part = ExpertPart(first=4, count=4, width_index=rank, width_parts=2)
        with open_reader(tmp_path / "packed") as reader:
            experts = read_quantized_experts(reader, ops, "model.layers.1.mlp.experts.", part, SILU)
        assert experts is not None
        prefix, half = "model.layers.1.mlp.experts.6.", slice(16 * rank, 16 * (rank + 1))
        gate_up = torch.cat([plain[f"{prefix}gate_proj.weight"][half], plain[f"{prefix}up_proj.weight"][half]])
        torch.testing.assert_close(dequantize(experts.w13)[2], gate_up)
        torch.testing.assert_close(dequantize(experts.w2)[2], plain[f"{prefix}down_proj.weight"][:, half])


class TestMxfp4:
    """Expert matrices, whose blocks run along the inputs while the family stores inputs first."""

    NAME = "model.layers.0.mlp.experts.down_proj"
    DESCRIPTION = QuantizationDescription(method="mxfp4", scheme=Mxfp4Scheme(), ignored=("lm_head",))

    def test_values(self, tmp_path: Path) -> None:
        experts = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(0))
        blocks, scales, values = mxfp4(experts.numpy())
        write_checkpoint(tmp_path / "packed", {}, {f"{self.NAME}_blocks": blocks, f"{self.NAME}_scales": scales})
        checkpoint = Checkpoint.open(tmp_path / "packed")
        layout = find_layout({self.NAME: (3, 64, 40)}, checkpoint, self.DESCRIPTION)
        checkpoint.require(layout.required)
        bar = LoadProgress(1, enabled=False)
        with WeightReader(checkpoint, torch.float32, torch.device("cpu"), bar, quantized=layout.quantized) as reader:
            read = reader.read(self.NAME)
        assert torch.equal(read, torch.from_numpy(values).transpose(1, 2))
        assert (read.transpose(1, 2) - experts).abs().max() < experts.abs().max() / 4

    def test_missing_scales(self, tmp_path: Path) -> None:
        blocks, _, _ = mxfp4(torch.randn(3, 40, 64).numpy())
        write_checkpoint(tmp_path / "packed", {}, {f"{self.NAME}_blocks": blocks})
        checkpoint = Checkpoint.open(tmp_path / "packed")
        layout = find_layout({self.NAME: (3, 64, 40)}, checkpoint, self.DESCRIPTION)
        with pytest.raises(StartupError, match=f"missing checkpoint tensor {self.NAME}_scales"):
            checkpoint.require(layout.required)
