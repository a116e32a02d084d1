"""Qwen3-MoE, GLM-4.5, gpt-oss and Gemma 3: config.json in all its spellings, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_lite.models.description import ModelDescription, describe, read_description
from sglang_lite.models.families import REFUSED, supported_architectures
from sglang_lite.models.gemma3_config import canonical_name
from sglang_lite.models.gemma3_config import details_of as gemma_details
from sglang_lite.models.gpt_oss_config import details_of as gpt_oss_details
from sglang_lite.models.moe_config import MoEDescription
from sglang_lite.models.registry import expected_tensors
from sglang_lite.types import StartupError

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
QWEN3_MOE = {**COMMON, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
GLM4 = {**COMMON, "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8}
GPT_OSS = {**COMMON, "architectures": ["GptOssForCausalLM"], "num_local_experts": 8}
GEMMA3 = {**COMMON, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "sliding_window": 8}


def moe_of(description: ModelDescription) -> MoEDescription:
    assert isinstance(description.details, MoEDescription)
    return description.details


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_the_number_of_experts_has_three_names(key: str) -> None:
    values = {name: value for name, value in QWEN3_MOE.items() if name != "num_experts"}
    assert moe_of(describe({**values, key: 6})).num_experts == 6


def test_experts_per_token_has_two_names() -> None:
    values = {name: value for name, value in QWEN3_MOE.items() if name != "num_experts_per_tok"}
    assert moe_of(describe({**values, "num_experts_per_token": 3})).top_k == 3


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, (True, True, True, True)),
        ({"mlp_only_layers": [0, 2]}, (False, True, False, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (False, True, False, False)),
        ({"mlp_only_layers": None}, (True, True, True, True)),
    ],
)
def test_dense_layers_of_qwen3_moe(changes: dict[str, Any], sparse: tuple[bool, ...]) -> None:
    description = describe({**QWEN3_MOE, **changes})
    assert moe_of(description).sparse_layers == sparse
    names = expected_tensors(description)
    for layer, is_sparse in enumerate(sparse):
        assert (f"model.layers.{layer}.mlp.experts.7.down_proj.weight" in names) is is_sparse
        assert (f"model.layers.{layer}.mlp.gate_proj.weight" in names) is not is_sparse


def test_qwen3_moe_is_qwen3_beside_its_experts() -> None:
    description = describe({**QWEN3_MOE, "attention_bias": True, "norm_topk_prob": True})
    assert (description.qkv_bias, description.output_bias, description.query_key_norm) == (True, True, True)
    assert (moe_of(description).scoring, moe_of(description).renormalize) == ("softmax", True)


def test_glm4_defaults() -> None:
    description = describe(GLM4)
    moe = moe_of(description)
    assert (description.qkv_bias, description.output_bias, description.query_key_norm) == (False, False, False)
    assert description.rope.rotary_dim == 8  # half of each head
    assert moe.sparse_layers == (False, True, True, True)
    assert (moe.scoring, moe.renormalize, moe.has_correction_bias, moe.group_score) == (
        "sigmoid",
        True,
        True,
        "top_2_sum",
    )
    assert (moe.num_groups, moe.kept_groups, moe.scaling, moe.shared_intermediate_size) == (1, 1, 1.0, 0)


def test_glm4_options() -> None:
    changes = {"attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 3, "n_shared_experts": 2}
    description = describe({**GLM4, **changes, "partial_rotary_factor": 0.25, "routed_scaling_factor": 2.5})
    assert (description.qkv_bias, description.output_bias, description.query_key_norm) == (True, False, True)
    assert description.rope.rotary_dim == 4
    assert moe_of(description).sparse_layers == (False, False, False, True)
    assert moe_of(description).scaling == 2.5
    assert expected_tensors(description)["model.layers.3.mlp.shared_experts.up_proj.weight"] == (64, 64)
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}
    assert describe({**GLM4, **newer}).rope.rotary_dim == 4


def test_prediction_layers_behind_the_last_one_are_not_asked_for() -> None:
    names = expected_tensors(describe({**GLM4, "num_nextn_predict_layers": 1}))
    assert not any(name.startswith("model.layers.4.") for name in names)


def test_gpt_oss_defaults() -> None:
    description = describe(GPT_OSS)
    assert description.sliding_windows == (128, None, 128, None)
    assert (description.qkv_bias, description.output_bias) == (True, True)
    assert description.rope.theta == 150_000.0
    details = gpt_oss_details(description)
    assert (details.alpha, details.limit, details.moe.scoring) == (1.702, 7.0, "top_k_softmax")
    assert expected_tensors(description)["model.layers.0.mlp.experts.gate_up_proj"] == (8, 64, 192)


def test_gpt_oss_layer_types_and_both_generations_of_rope_keys() -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    yarn = {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 32.0}
    old = {"rope_theta": 150_000.0, "rope_scaling": {"rope_type": "yarn", **yarn}}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 150_000.0, **yarn}}
    changes = {"layer_types": kinds, "sliding_window": 6}
    first, second = describe({**GPT_OSS, **changes, **old}), describe({**GPT_OSS, **changes, **new})
    assert first == second
    assert first.sliding_windows == (None, None, 6, None)
    assert not first.rope.truncate
    assert first.rope.attention_factor == pytest.approx(1.3465735902799727)


def test_gemma3_defaults_are_those_that_published_files_leave_out() -> None:
    description = describe({"architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152, "num_hidden_layers": 7})
    assert (description.num_heads, description.num_kv_heads, description.head_dim) == (8, 4, 256)
    assert (description.vocab_size, description.context_length) == (262_208, 131_072)
    assert description.tie_word_embeddings
    assert description.sliding_windows == (4096,) * 5 + (None, 4096)
    assert (description.eos_token_ids, description.bos_token_id) == ((1,), 2)
    details = gemma_details(description)
    assert (description.rope.theta, details.local_rope.theta) == (1e6, 1e4)
    assert (details.scale, details.score_cap, details.logit_cap) == (1 / 16, None, None)


def test_gemma3_rope_in_both_generations() -> None:
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    first, second = describe({**GEMMA3, **old}), describe({**GEMMA3, **new})
    assert first == second
    assert (first.rope.rope_type, first.rope.theta, first.rope.factor) == ("linear", 5e5, 8.0)
    local = gemma_details(first).local_rope
    assert (local.rope_type, local.theta) == ("default", 2e4)
    assert first.context_length == 4096  # max_position_embeddings is the scaled length


@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_gemma3_patterns(key: str) -> None:
    assert describe({**GEMMA3, key: 3}).sliding_windows == (8, 8, None, 8, 8, None, 8)


def test_gemma3_softcaps() -> None:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 64}
    details = gemma_details(describe({**GEMMA3, **caps}))
    assert (details.score_cap, details.logit_cap, details.scale) == (50.0, 30.0, 1 / 8)


def test_the_text_part_of_a_multimodal_configuration() -> None:
    text = {name: value for name, value in GEMMA3.items() if name != "architectures"}
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 8, "num_hidden_layers": 1},
    }
    description = describe({**outer, "text_config": {**text, "model_type": "gemma3_text", "eos_token_id": None}})
    alone = describe(GEMMA3)
    assert description.is_wrapped
    assert not alone.is_wrapped
    assert (description.hidden_size, description.sliding_windows) == (alone.hidden_size, alone.sliding_windows)
    assert (description.eos_token_ids, description.dtype) == ((1, 106), "bfloat16")
    with pytest.raises(StartupError, match="'text_config' must be an object, for this architecture, it is absent"):
        describe(outer)


def test_overrides_reach_into_the_text_part(tmp_path: Path) -> None:
    text = {name: value for name, value in GEMMA3.items() if name != "architectures"}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    description = read_description(tmp_path, {"text_config": {"sliding_window": 4, "rope_theta": 7e5}})
    assert description.sliding_windows[0] == 4
    assert (description.rope.theta, description.hidden_size) == (7e5, 64)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.vision_model.embeddings.weight", "vision_tower.vision_model.embeddings.weight"),
    ],
)
def test_spellings_of_wrapped_tensors(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**QWEN3_MOE, "num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
        ({**QWEN3_MOE, "num_experts": None}, "'num_experts' must be a positive integer"),
        ({**QWEN3_MOE, "num_hidden_layers": 2**40}, "'num_hidden_layers' must be a positive integer, at most 4096"),
        ({**QWEN3_MOE, "num_experts": 2**40}, "'num_experts' must be a positive integer, at most 65536"),
        (
            {**QWEN3_MOE, "rope_scaling": {"type": "linear", "factor": 1e308}},
            "'rope_scaling.factor' must be small enough",
        ),
        ({**QWEN3_MOE, "mlp_only_layers": "0"}, "'mlp_only_layers' must be a list of layer indices"),
        ({**QWEN3_MOE, "hidden_act": "gelu"}, "'hidden_act' must be 'silu' for this architecture"),
        ({**QWEN3_MOE, "num_key_value_heads": 3}, "num_attention_heads 4 is not divisible by num_key_value_heads 3"),
        ({**GLM4, "n_group": 3}, "8 experts are not divisible by n_group 3"),
        ({**GLM4, "n_group": 2, "topk_group": 3}, "topk_group 3 is more than n_group 2"),
        ({**GLM4, "n_group": 8, "topk_group": 2}, "n_group 8 leaves less than two of the 8 experts a group"),
        (
            {**GLM4, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
            "num_experts_per_tok 3 is more than the experts in topk_group 1 of 4 groups",
        ),
        ({**GLM4, "n_shared_experts": -1}, "'n_shared_experts' must be a number of experts"),
        ({**GPT_OSS, "num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
        ({**GPT_OSS, "layer_types": ["linear_attention"] * 4}, "'layer_types' must be a list of 'full_attention' and"),
        ({**GPT_OSS, "rope_scaling": {"type": "longrope"}}, "rope type 'longrope'"),
        ({**GPT_OSS, "quantization_config": {"quant_method": "exl2"}}, "quantization method 'exl2'"),
        ({**GEMMA3, "hidden_activation": "silu"}, "'hidden_activation' must be 'gelu_pytorch_tanh'"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "'use_bidirectional_attention' must be false"),
        ({**GEMMA3, "layer_types": ["full_attention"]}, "'layer_types' must be a list of 7 entries"),
        ({**GEMMA3, "layer_types": [["full_attention"]] * 7}, "'layer_types' must be a list of 'full_attention'"),
        (
            {**GEMMA3, "rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {}}},
            "rope type 'dynamic'",
        ),
    ],
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message) as caught:
        describe(values, source="/models/x/config.json")
    assert "/models/x/config.json" in str(caught.value)


@pytest.mark.parametrize("architecture", sorted(REFUSED))
def test_refused_architectures_are_given_their_reason(architecture: str) -> None:
    with pytest.raises(StartupError) as caught:
        describe({**COMMON, "architectures": [architecture]}, source="/models/x/config.json")
    message = str(caught.value)
    assert f"{architecture} is not served: {REFUSED[architecture]}" in message
    assert all(name in message for name in supported_architectures())
