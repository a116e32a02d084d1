"""Inverse frequencies equal transformers' for every scaling, and the table is cos and sin of position times them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sglang_lite.layers.rope_parameters import RopeParameters
from sglang_lite.layers.rotary import RotaryTable, inverse_frequencies
from sglang_lite.models.description import describe

CASES: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attention_factor": 1.3},
]


def config(rope_parameters: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
        rope_parameters=rope_parameters,
    )


@pytest.mark.parametrize("rope_parameters", CASES)
def test_frequencies_equal_transformers(rope_parameters: dict[str, Any]) -> None:
    oracle_config = config(rope_parameters)
    if "original_max_position_embeddings" not in rope_parameters:
        oracle_config.rope_parameters["original_max_position_embeddings"] = 4096
    expected, attention_factor = ROPE_INIT_FUNCTIONS[rope_parameters["rope_type"]](oracle_config, torch.device("cpu"))
    rope = describe(config(rope_parameters).to_dict()).rope
    assert rope.attention_factor == pytest.approx(attention_factor)
    torch.testing.assert_close(inverse_frequencies(rope), expected, rtol=1e-6, atol=0)


def test_plain_frequencies() -> None:
    rope = RopeParameters(rope_type="default", theta=10_000.0, rotary_dim=8)
    torch.testing.assert_close(inverse_frequencies(rope), torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_the_table_holds_scaled_cos_and_sin_of_each_position() -> None:
    rope = RopeParameters(rope_type="default", theta=10_000.0, rotary_dim=8, attention_factor=1.5)
    table = RotaryTable(rope, 100, torch.device("cpu"))
    positions = torch.tensor([99, 0, 7, 7])
    cos, sin = table.at(positions)
    angles = positions[:, None].double() * torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos.double(), 1.5 * angles.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(sin.double(), 1.5 * angles.sin(), atol=1e-5, rtol=0)


def test_long_tables_grow_to_the_positions_used() -> None:
    rope = RopeParameters(rope_type="default", theta=10_000.0, rotary_dim=8)
    whole = RotaryTable(rope, 32_000, torch.device("cpu"))
    growing = RotaryTable(rope, 1_000_000, torch.device("cpu"))
    for positions in (torch.tensor([0, 31_999]), torch.tensor([500_000, 3]), torch.tensor([999_999, 40_000])):
        cos, sin = growing.at(positions)
        angles = positions[:, None].float() * inverse_frequencies(rope)
        torch.testing.assert_close(cos, angles.cos(), atol=1e-6, rtol=0)
        torch.testing.assert_close(sin, angles.sin(), atol=1e-6, rtol=0)
    assert torch.equal(growing.at(torch.arange(32_000))[0], whole.at(torch.arange(32_000))[0])


@pytest.mark.parametrize("num_positions", [100, 40_000])
def test_positions_past_the_table_are_refused(num_positions: int) -> None:
    table = RotaryTable(
        RopeParameters(rope_type="default", theta=1e4, rotary_dim=8), num_positions, torch.device("cpu")
    )
    with pytest.raises(IndexError):
        table.at(torch.tensor([num_positions]))
