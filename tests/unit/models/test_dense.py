"""What the decoder asks of the device: few operations a layer, merged matrices, a shared embedding."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch, KVGeometry
from sglang_lite.models.dense_names import expected_tensors
from sglang_lite.models.description import read_description
from sglang_lite.models.registry import load_model
from tests.support.reference_operations import ReferenceLinear, ReferenceOperations
from tests.support.safetensors_files import write_arrays

NUM_LAYERS = 3
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


def counted_operations() -> tuple[MagicMock, MagicMock]:
    """Reference operations whose calls are recorded, and the record of products of packed matrices."""
    products = MagicMock()
    ops = MagicMock(wraps=ReferenceOperations())
    ops.device = torch.device("cpu")

    def pack_linear(weight: Tensor, bias: Tensor | None, *, shared: bool = False) -> MagicMock:
        products.attach_mock(linear := MagicMock(wraps=ReferenceLinear(weight, bias)), "linear")
        return linear

    ops.pack_linear.side_effect = pack_linear
    return ops, products


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes = expected_tensors(read_description(tmp_path))
    write_arrays(tmp_path / "model.safetensors", {name: torch.randn(shape).numpy() for name, shape in shapes.items()})
    return tmp_path


def test_a_layer_is_nine_operations(directory: Path) -> None:
    ops, products = counted_operations()
    model, _ = load_model(directory, ops=ops)
    geometry = KVGeometry(2, 16, NUM_LAYERS, 1, 4, torch.float32)
    pool = torch.zeros(2, NUM_LAYERS, 2, 16, 1, 4)
    batch = AttentionBatch(0, [5], [5], torch.arange(5), torch.tensor([[0]]))
    plan = ops.plan_attention(batch, geometry)
    ops.reset_mock()
    model.forward(torch.arange(5), torch.arange(5), pool, plan)
    assert Counter(name for name, _, _ in ops.method_calls) == {
        "embedding": 1,
        "rms_norm": 1,
        "rotary_neox": NUM_LAYERS,
        "attention": NUM_LAYERS,
        "silu_and_mul": NUM_LAYERS,
        "add_rms_norm": 2 * NUM_LAYERS,
    }
    assert len(products.method_calls) == 4 * NUM_LAYERS


def test_projections_of_one_input_are_merged_and_the_tied_embedding_is_shared(directory: Path) -> None:
    ops, _ = counted_operations()
    load_model(directory, ops=ops)
    layer = [(16, 8), (8, 8), (24, 8), (8, 12)]  # q|k|v, output, gate|up, down
    packed = ops.pack_linear.call_args_list
    assert [tuple(call.args[0].shape) for call in packed] == [*layer * NUM_LAYERS, (16, 8)]
    assert [call.kwargs.get("shared", False) for call in packed] == [False] * (4 * NUM_LAYERS) + [True]


def test_weights_take_the_type_asked_for(directory: Path) -> None:
    ops, _ = counted_operations()
    load_model(directory, ops=ops, dtype=torch.bfloat16)
    assert {call.args[0].dtype for call in ops.pack_linear.call_args_list} == {torch.bfloat16}
