"""Start-up checks need no torch, and a damaged checkpoint is named before a weight is read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sglang_lite.models.dense_names import expected_tensors
from sglang_lite.models.description import read_description
from sglang_lite.models.families import REFUSED, TABLE
from sglang_lite.models.registry import check_checkpoint, load_model, supported_architectures
from sglang_lite.types import StartupError
from tests.support.reference_operations import ReferenceOperations
from tests.support.safetensors_files import write_arrays

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 16,
    "max_position_embeddings": 32,
    "eos_token_id": 2,
}


def write_model(directory: Path, drop: str | None = None, **changes: Any) -> dict[str, npt.NDArray[np.float32]]:
    """A checkpoint whose tensors all differ; without the tensor ``drop``."""
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    shapes = expected_tensors(read_description(directory))
    arrays = {
        name: np.full(shape, index + 1, np.float32)
        for index, (name, shape) in enumerate(shapes.items())
        if name != drop
    }
    write_arrays(directory / "model.safetensors", arrays)
    return arrays


def test_supported_architectures() -> None:
    supported = supported_architectures()
    assert list(supported) == sorted(supported)
    assert {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(supported)
    assert len(supported) == sum(len(family.architectures) for family in TABLE)  # no family hides another
    assert not set(REFUSED) & set(supported)


def test_start_up_checks_do_not_import_torch(tmp_path: Path) -> None:
    write_model(tmp_path)
    program = (
        "import sys; from sglang_lite.models import registry, repository, description; "
        "path = repository.resolve_model_path(sys.argv[1]); "
        "registry.check_checkpoint(path, description.read_description(path)); "
        "assert not {'torch', 'safetensors', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.k_norm.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, drop=name)
    with pytest.raises(StartupError, match=f"missing checkpoint tensor {name}"):
        check_checkpoint(tmp_path, read_description(tmp_path))
    with pytest.raises(StartupError, match=f"missing checkpoint tensor {name}"):
        load_model(tmp_path, ops=ReferenceOperations())


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    message = r"tensor model\.layers\.0\.mlp\.gate_proj\.weight shape \[12, 8\] does not match expected \[13, 8\]"
    with pytest.raises(StartupError, match=message):
        load_model(tmp_path, ops=ReferenceOperations(), overrides={"intermediate_size": 13})


def test_a_tied_model_needs_no_output_matrix(tmp_path: Path) -> None:
    arrays = write_model(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in arrays
    model, description = load_model(tmp_path, ops=ReferenceOperations())
    assert description.tie_word_embeddings
    hidden = torch.ones(1, 8)
    assert torch.equal(model.logits(hidden), hidden @ torch.from_numpy(arrays["model.embed_tokens.weight"]).T)


def test_an_untied_output_matrix_is_used(tmp_path: Path) -> None:
    arrays = write_model(tmp_path)
    model, _ = load_model(tmp_path, ops=ReferenceOperations())
    hidden = torch.ones(1, 8)
    assert torch.equal(model.logits(hidden), hidden @ torch.from_numpy(arrays["lm_head.weight"]).T)


def test_sizes_of_the_loaded_model(tmp_path: Path) -> None:
    write_model(tmp_path)
    model, _ = load_model(tmp_path, ops=ReferenceOperations())
    assert (model.num_layers, model.num_kv_heads, model.head_dim, model.vocab_size) == (2, 1, 4, 16)


def test_weights_outlive_their_file(tmp_path: Path) -> None:
    """Weights are copied out of the mapped file: replacing it does not reach the running model."""
    arrays = write_model(tmp_path)
    model, _ = load_model(tmp_path, ops=ReferenceOperations())
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        handle.write(bytes(file.stat().st_size - file.stat().st_size // 2))
    hidden = torch.ones(1, 8)
    assert torch.equal(model.logits(hidden), hidden @ torch.from_numpy(arrays["lm_head.weight"]).T)


def test_progress_is_silent_for_small_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path)
    load_model(tmp_path, ops=ReferenceOperations())
    assert capsys.readouterr().err == ""
