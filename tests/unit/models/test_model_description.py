"""config.json and generation_config.json become a ModelDescription, or an error that names the field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sglang_lite.models.description import describe, read_description
from sglang_lite.types import StartupError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [architecture], **changes}


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key not in keys}


def test_plain_llama() -> None:
    description = describe(config(torch_dtype="bfloat16", rms_norm_eps=1e-5, rope_theta=1e5))
    assert description.architecture == "LlamaForCausalLM"
    assert (description.num_heads, description.num_kv_heads, description.head_dim) == (4, 2, 16)
    assert description.context_length == 4096
    assert description.rms_norm_eps == 1e-5
    assert description.rope.rope_type == "default"
    assert description.rope.theta == 1e5
    assert description.rope.rotary_dim == 16
    assert description.dtype == "bfloat16"
    assert not description.tie_word_embeddings
    assert description.sliding_windows == (None,) * 4
    assert description.sliding_window is None
    assert (description.bos_token_id, description.pad_token_id) == (1, None)


@pytest.mark.parametrize(
    ("architecture", "changes", "biases", "query_key_norm"),
    [
        ("LlamaForCausalLM", {}, (False, False, False), False),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True), False),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False), False),
        ("Qwen2ForCausalLM", {}, (True, False, False), False),
        ("Qwen3ForCausalLM", {}, (False, False, False), True),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False), True),
    ],
)
def test_families_differ_in_biases_and_norms(
    architecture: str, changes: dict[str, Any], biases: tuple[bool, bool, bool], query_key_norm: bool
) -> None:
    description = describe(config(architecture, **changes))
    assert (description.qkv_bias, description.output_bias, description.mlp_bias) == biases
    assert description.query_key_norm is query_key_norm


@pytest.mark.parametrize("head_dim", [None, 32])
def test_head_dim_may_be_null_or_differ_from_hidden_over_heads(head_dim: int | None) -> None:
    assert describe(config(head_dim=head_dim)).head_dim == (head_dim or 16)


def test_kv_heads_default_to_query_heads() -> None:
    assert describe(without("num_key_value_heads")).num_kv_heads == 4


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None, None, None)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "max_window_layers": 1}, (None, None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, (None, None, None, None)),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            (None, 8, 8, 8),
        ),
        ("Qwen3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, (8, 8, 8, 8)),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            },
            (None, 8, None, 8),
        ),
    ],
)
def test_sliding_windows(architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    description = describe(config(architecture, **changes))
    assert description.sliding_windows == windows
    assert description.sliding_window == (8 if None not in windows else None)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("rope_type", "values"), [("default", {}), ("linear", {"factor": 2.0}), ("llama3", LLAMA3), ("yarn", YARN)]
)
def test_both_generations_of_rope_keys_say_the_same(rope_type: str, values: dict[str, float]) -> None:
    old = describe(config(rope_theta=5e5, rope_scaling={"type": rope_type, **values}))
    older_key = describe(config(rope_theta=5e5, rope_scaling={"rope_type": rope_type, **values}))
    new = describe(config(rope_parameters={"rope_type": rope_type, "rope_theta": 5e5, **values}))
    assert old == older_key == new
    assert new.rope.rope_type == rope_type
    assert new.rope.theta == 5e5


@pytest.mark.parametrize(
    ("scaling", "context_length"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"type": "yarn", "factor": 4.0}, 16384),
        ({"type": "yarn", **YARN}, 4096),
        ({"type": "llama3", **LLAMA3}, 4096),
    ],
)
def test_context_length_includes_the_scaling(scaling: dict[str, Any] | None, context_length: int) -> None:
    assert describe(config(rope_scaling=scaling)).context_length == context_length


def test_yarn_takes_the_original_length_from_the_config_when_it_names_none() -> None:
    assert describe(config(rope_scaling={"type": "yarn", "factor": 4.0})).rope.original_context_length == 4096


@pytest.mark.parametrize(
    ("values", "attention_factor"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.5, "mscale_all_dim": 1.0}, (0.05 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 0.5}, 0.1 * math.log(4) + 1),
    ],
)
def test_yarn_attention_factor(values: dict[str, float], attention_factor: float) -> None:
    description = describe(config(rope_parameters={"rope_type": "yarn", **YARN, **values}))
    assert description.rope.attention_factor == pytest.approx(attention_factor)


def test_partial_rotation() -> None:
    assert describe(config(partial_rotary_factor=0.5)).rope.rotary_dim == 8
    assert describe(config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})).rope.rotary_dim == 8


@pytest.mark.parametrize(
    ("eos", "generation_eos", "expected"),
    [(2, None, (2,)), ([2, 5], 2, (2, 5)), (None, [7, 8], (7, 8)), (2, [2, 9], (2, 9)), (None, None, ())],
)
def test_end_tokens_of_both_files_are_merged(eos: Any, generation_eos: Any, expected: tuple[int, ...]) -> None:
    assert describe(config(eos_token_id=eos), {"eos_token_id": generation_eos}).eos_token_ids == expected


def test_a_pad_token_of_minus_one_means_none() -> None:
    assert describe(config(pad_token_id=-1)).pad_token_id is None


def test_generation_defaults_are_the_sampling_numbers_only() -> None:
    generation = {"temperature": 0.6, "top_k": 20, "do_sample": True, "top_p": None, "transformers_version": "5"}
    assert describe(config(), generation).generation_defaults == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("architectures", [None, []])
def test_absent_architectures(architectures: Any) -> None:
    with pytest.raises(StartupError, match=r"has no 'architectures': model selection requires it.*Qwen3ForCausalLM"):
        describe({**LLAMA, "architectures": architectures})


def test_unknown_architecture_lists_requested_and_supported() -> None:
    with pytest.raises(StartupError) as caught:
        describe(config("BertForMaskedLM"))
    for name in ("BertForMaskedLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (config(architectures="LlamaForCausalLM"), "'architectures' must be a list of names"),
        (config(hidden_act="gelu"), "'hidden_act' must be 'silu' for this architecture, got 'gelu'"),
        (config(num_key_value_heads=3), "num_attention_heads 4 is not divisible by num_key_value_heads 3"),
        (config(hidden_size=66), "hidden_size 66 is not divisible by num_attention_heads 4"),
        (
            config(quantization_config={"quant_method": "bitsandbytes"}),
            "quantization method 'bitsandbytes'.*not supported; supported methods: fp8, awq, gptq",
        ),
        (config(rope_scaling={"type": "longrope"}), "rope type 'longrope' .*supported types: default, linear"),
        (config(rope_parameters={"rope_type": "dynamic", "factor": 2}), "rope type 'dynamic'"),
        (config(rope_scaling={"type": "linear"}), "'rope_scaling.factor' must be a positive number, it is absent"),
        (config(rope_scaling={"type": "linear", "factor": "2"}), "'rope_scaling.factor' must be a positive number"),
        (config(rope_scaling="linear"), "'rope_scaling' must be an object or null"),
        (config(rope_parameters={"rope_type": "llama3", "factor": 8}), "'rope_parameters.low_freq_factor'"),
        (config(rope_scaling={**LLAMA3, "type": "llama3", "high_freq_factor": 1.0}), "larger than low_freq_factor"),
        (config(partial_rotary_factor=0.1), "gives 1 rotated elements"),
        (config(vocab_size="128"), "'vocab_size' must be a positive integer, got '128'"),
        (config(num_hidden_layers=0), "'num_hidden_layers' must be a positive integer, got 0"),
        (config(hidden_size=True), "'hidden_size' must be a positive integer, got True"),
        (without("intermediate_size"), "'intermediate_size' must be a positive integer, it is absent"),
        (without("max_position_embeddings"), "'max_position_embeddings'"),
        (config(rms_norm_eps=0), "'rms_norm_eps' must be a positive number"),
        (config(tie_word_embeddings="yes"), "'tie_word_embeddings' must be true or false, got 'yes'"),
        (config(eos_token_id="</s>"), "'eos_token_id' must be a token id or a list of token ids"),
    ],
)
def test_unsupported_or_malformed_fields_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message) as caught:
        describe(values, source="/models/x/config.json")
    assert "/models/x/config.json" in str(caught.value)


@pytest.mark.parametrize("layer_types", [["full_attention"], ["linear_attention"] * 4, "full_attention"])
def test_layer_types_must_fit(layer_types: Any) -> None:
    values = config("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=8, layer_types=layer_types)
    with pytest.raises(StartupError, match="'layer_types' must be a list"):
        describe(values)


def test_reading_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert read_description(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "temperature": 0.5}))
    description = read_description(str(tmp_path))
    assert description.eos_token_ids == (2, 3)
    assert description.generation_defaults == {"temperature": 0.5}


def test_overrides_replace_top_level_keys(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(rope_theta=5e5)))
    overrides = {"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 2.0}}
    description = read_description(tmp_path, overrides)
    assert description.context_length == 1024
    assert (description.rope.rope_type, description.rope.theta) == ("linear", 5e5)


def test_old_rope_keys_override_the_new_form(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 5e5, **YARN}
    (tmp_path / "config.json").write_text(json.dumps(config(rope_parameters=rope)))
    linear = read_description(tmp_path, {"rope_scaling": {"type": "linear", "factor": 2.0}}).rope
    assert (linear.rope_type, linear.factor, linear.theta) == ("linear", 2.0, 5e5)
    assert read_description(tmp_path, {"rope_theta": 1e6}).rope.theta == 1e6
    assert read_description(tmp_path, {"rope_scaling": None}).rope.rope_type == "default"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read model config: there is no config.json in"),
        ("{", "cannot parse model config .*config.json"),
        ("[]", "expected a JSON object, got list"),
        ("[" * 100_000, "cannot parse model config .*config.json"),
    ],
)
def test_unreadable_config(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartupError, match=message) as caught:
        read_description(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_unreadable_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    (tmp_path / "generation_config.json").write_bytes(b"\xff")
    with pytest.raises(StartupError, match=r"cannot read generation config .*generation_config\.json"):
        read_description(tmp_path)
