"""gpt-oss as it is published: experts in MXFP4, beside transformers with the values that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_lite.models.registry import load_model
from sglang_lite.types import StartupError
from tests.support.model_library import Library, full_pass
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import mxfp4
from tests.support.tiny_checkpoints import CASES, save_checkpoint

MATRICES = ("gate_up_proj", "down_proj")
IGNORED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, torch.nn.Module]:
    """A checkpoint with packed experts, and the transformers model whose experts have the packed values."""
    oracle = save_checkpoint(CASES["gpt_oss"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    parameters = dict(oracle.named_parameters())
    for name in [name for name in tensors if name.endswith(MATRICES)]:
        plain = tensors.pop(name)  # [experts, in, out]; blocks run along the inputs
        blocks, scales, values = mxfp4(plain.transpose(1, 2).contiguous().numpy())
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        parameters[name].data.copy_(torch.from_numpy(values).transpose(1, 2))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": IGNORED}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, oracle


@pytest.mark.parametrize("operations", ["reference", "cpu"])
def test_packed_experts_equal_transformers_with_their_values(
    published: tuple[Path, torch.nn.Module], library: Library, operations: str
) -> None:
    directory, oracle = published
    ops = library.operations[operations]
    model, description = load_model(directory, ops=ops)
    assert description.quantization is not None
    runner = PagedRunner(model, ops, page_size=4)
    token_ids = library.example("gpt_oss").token_ids
    sequence = runner.new_sequence()
    logits = torch.cat([runner.step([(sequence, part)])[0] for part in (token_ids[:13], token_ids[13:30])])
    expected = full_pass(oracle, token_ids[:30])
    assert (logits - expected).abs().max().item() <= 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    unpacked = library.example("gpt_oss").logits[:30]
    assert (expected - unpacked).abs().max().item() > 0.1  # packing is seen in the logits


def test_a_missing_scale_is_named(published: tuple[Path, torch.nn.Module], library: Library) -> None:
    directory, _ = published
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.down_proj_scales"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    message = r"missing checkpoint tensor model\.layers\.2\.mlp\.experts\.down_proj_scales"
    with pytest.raises(StartupError, match=message):
        load_model(directory, ops=library.operations["cpu"])
