"""Forms in which checkpoints with latent attention are published: inside a larger model, quantized, other names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_lite.models.registry import load_model
from sglang_lite.types import StartupError
from tests.support.model_library import Example, Library
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import FORMATS, quantize_checkpoint, write_checkpoint

Renaming = Callable[[str], str]


def logits(directory: Path, library: Library, token_ids: list[int]) -> Tensor:
    """float32[tokens, vocab]: a chunk that ends inside a page, then one token a step."""
    ops = library.operations["cpu"]
    runner = PagedRunner(load_model(directory, ops=ops, progress=False)[0], ops, page_size=4)
    sequence = runner.new_sequence()
    outputs = runner.step([(sequence, token_ids[:22])])
    for token in token_ids[22:]:
        outputs += runner.step([(sequence, [token])])
    return torch.cat(outputs)


def rewrite(
    example: Example, directory: Path, rename: Renaming, config: dict[str, Any] | None = None, **extra: Tensor
) -> None:
    """A checkpoint with other tensor names, perhaps another config.json and more tensors."""
    tensors = {rename(name): tensor for name, tensor in load_file(example.directory / "model.safetensors").items()}
    given = json.loads((example.directory / "config.json").read_text())
    write_checkpoint(directory, given if config is None else config, tensors | extra)


def assert_same(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    assert (actual - expected).abs().max().item() <= tolerance
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


def kimi_k25_config(example: Example, **text: Any) -> dict[str, Any]:
    """The configuration of the whole model around the text model's."""
    inner = json.loads((example.directory / "config.json").read_text())
    del inner["architectures"]
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {**inner, "model_type": "kimi_k2", **text},
        "vision_config": {"hidden_size": 32},
        "tie_word_embeddings": True,
    }


@pytest.mark.parametrize("prefix", ["language_model.model.", "language_model."])
def test_kimi_k25_text_model_inside_the_whole(tmp_path: Path, library: Library, prefix: str) -> None:
    """Both spellings of the decoder's prefix; vision tensors are not read; the output matrix that is there counts."""
    example = library.example("kimi_k2")

    def rename(name: str) -> str:
        return prefix + name.removeprefix("model.") if name.startswith("model.") else f"language_model.{name}"

    vision = {"vision_tower.blocks.0.weight": torch.randn(3, 3), "mm_projector.weight": torch.randn(2, 2)}
    rewrite(example, tmp_path / "whole", rename, kimi_k25_config(example), **vision)
    assert_same(logits(tmp_path / "whole", library, example.token_ids), example.logits)


def test_kimi_k25_experts_packed_in_four_bits(tmp_path: Path, library: Library) -> None:
    """Routed experts alone are compressed, and ``text_config`` says so."""
    example = library.example("kimi_k2")
    storage = FORMATS["compressed_int4_32"]
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    quantize_checkpoint(example.directory, packed, plain, storage, lambda name: ".mlp.experts." in name)
    whole = tmp_path / "whole"
    tensors = {f"language_model.{name}": value for name, value in load_file(packed / "model.safetensors").items()}
    assert "language_model.model.layers.1.mlp.experts.7.down_proj.weight_packed" in tensors
    quantization = {**storage.config, "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"]}
    write_checkpoint(whole, kimi_k25_config(example, quantization_config=quantization), tensors)
    expected = logits(plain, library, example.token_ids)
    assert_same(logits(whole, library, example.token_ids), expected, tolerance=1e-5)
    assert (expected - example.logits).abs().max() > 1e-2, "four bits change the result, or nothing was packed"


def test_an_unknown_layout_of_packed_experts_is_refused_by_name(tmp_path: Path, library: Library) -> None:
    example = library.example("kimi_k2")
    quantization = {**FORMATS["compressed_int4_32"].config, "format": "marlin-24"}
    rewrite(example, tmp_path / "whole", str, kimi_k25_config(example, quantization_config=quantization))
    with pytest.raises(StartupError, match="marlin-24"):
        load_model(tmp_path / "whole", ops=library.operations["cpu"])


def test_fp8_blocks_as_deepseek_v3_publishes_them(tmp_path: Path, library: Library) -> None:
    """All projections, the one that makes keys and values of latents included, whose rows the heads share out."""
    example = library.example("deepseek_v3_yarn")
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    quantize_checkpoint(
        example.directory,
        packed,
        plain,
        FORMATS["fp8_blocks_uneven"],
        lambda name: name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight")),
    )
    names = load_file(packed / "model.safetensors").keys()
    assert {"model.layers.1.self_attn.kv_b_proj.weight_scale_inv", "model.layers.2.mlp.gate.weight"} <= names
    expected = logits(plain, library, example.token_ids)
    assert_same(logits(packed, library, example.token_ids), expected, tolerance=1e-5)
    assert (expected - example.logits).abs().max() > 1e-2


def test_expert_matrices_named_w1_w2_w3(tmp_path: Path, library: Library) -> None:
    example = library.example("deepseek_v3")
    short = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}

    def rename(name: str) -> str:
        return re.sub(r"(experts\.\d+|shared_experts)\.(\w+)\.", lambda found: f"{found[1]}.{short[found[2]]}.", name)

    rewrite(example, tmp_path / "short", rename)
    assert "model.layers.1.mlp.experts.0.w2.weight" in load_file(tmp_path / "short" / "model.safetensors")
    assert_same(logits(tmp_path / "short", library, example.token_ids), example.logits)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path, library: Library) -> None:
    example = library.example("deepseek_v3")
    extra = {
        "model.layers.3.enorm.weight": torch.full((64,), float("nan")),
        "model.layers.3.eh_proj.weight": torch.full((64, 128), float("nan")),
        "model.layers.3.mlp.experts.0.up_proj.weight": torch.full((32, 64), float("nan")),
    }
    config = json.loads((example.directory / "config.json").read_text())
    rewrite(example, tmp_path / "more", str, {**config, "num_nextn_predict_layers": 1}, **extra)
    assert_same(logits(tmp_path / "more", library, example.token_ids), example.logits)


def test_a_missing_expert_is_named(tmp_path: Path, library: Library) -> None:
    example = library.example("deepseek_v3")
    missing = "model.layers.2.mlp.experts.5.up_proj.weight"
    rewrite(example, tmp_path / "part", lambda name: "other" if name == missing else name)
    with pytest.raises(StartupError, match=f"missing checkpoint tensor {re.escape(missing)}"):
        load_model(tmp_path / "part", ops=library.operations["cpu"])
