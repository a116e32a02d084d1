"""Published configurations of the families with latent attention, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sglang_lite.models.deepseek_config import canonical_name, details_of, expected_tensors
from sglang_lite.models.description import describe
from sglang_lite.types import StartupError

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
V2_LITE = {
    **V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "intermediate_size": 10944,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "rope_scaling": {**V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
}
K2_TEXT = {
    **{key: value for key, value in V3.items() if key != "architectures"},
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "vocab_size": 163840,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0,
}
V32 = {
    **V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
GLM_LITE = {
    **V3,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rope_scaling": None,
    "n_group": 1,
    "topk_group": 1,
}


def test_deepseek_v3() -> None:
    description = describe(V3)
    latent, moe = details_of(description).latent, details_of(description).moe
    assert description.kv.num_tensors == 1 and description.kv.num_layers == 61
    assert (description.kv.num_kv_heads, description.kv.key_width, description.kv.value_width) == (1, 576, 512)
    assert description.context_length == 163840
    assert description.rope.rotary_dim == 64 and description.rope.attention_factor == 1.0
    magnitude = 0.1 * math.log(40) + 1
    assert latent.scale == pytest.approx(magnitude**2 / math.sqrt(192))
    assert moe is not None
    assert moe.sparse_layers == (False,) * 3 + (True,) * 58
    assert (moe.num_experts, moe.top_k, moe.num_groups, moe.kept_groups) == (256, 8, 8, 4)
    assert (moe.scoring, moe.group_score, moe.renormalize, moe.scaling) == ("sigmoid", "top_2_sum", True, 2.5)
    assert moe.has_correction_bias and moe.shared_intermediate_size == 2048
    shapes = expected_tensors(description)
    assert shapes["model.layers.0.self_attn.q_a_proj.weight"] == (1536, 7168)
    assert shapes["model.layers.0.self_attn.q_b_proj.weight"] == (128 * 192, 1536)
    assert shapes["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert shapes["model.layers.0.self_attn.kv_b_proj.weight"] == (128 * 256, 512)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (7168, 128 * 128)
    assert shapes["model.layers.2.mlp.down_proj.weight"] == (7168, 18432)
    assert shapes["model.layers.3.mlp.experts.255.down_proj.weight"] == (7168, 2048)
    assert shapes["model.layers.3.mlp.gate.e_score_correction_bias"] == (256,)
    assert not [name for name in shapes if name.startswith("model.layers.61.")], "prediction layers are not read"


def test_deepseek_v2_lite_projects_queries_at_once_and_routes_by_softmax() -> None:
    description = describe(V2_LITE)
    latent, moe = details_of(description).latent, details_of(description).moe
    assert latent.query_rank is None
    assert moe is not None
    assert (moe.scoring, moe.num_groups, moe.renormalize, moe.has_correction_bias) == ("softmax", 1, False, False)
    assert moe.shared_intermediate_size == 2816
    shapes = expected_tensors(description)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (16 * 192, 2048)
    assert "model.layers.1.self_attn.q_a_proj.weight" not in shapes


def test_deepseek_v2_keeps_the_groups_of_the_best_expert() -> None:
    config = {**V2_LITE, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    moe = details_of(describe(config)).moe
    assert moe is not None and (moe.num_groups, moe.kept_groups, moe.group_score) == (8, 3, "max")


def test_kimi_k25_is_the_text_part_of_a_larger_model() -> None:
    wrapper = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": K2_TEXT}
    description = describe(wrapper)
    assert description.is_wrapped and description.num_heads == 64
    assert description.rope.theta == 5e4
    assert details_of(description).moe == details_of(describe({**K2_TEXT, "architectures": V3["architectures"]})).moe


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("language_model.model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("language_model.layers.3.input_layernorm.weight", "model.layers.3.input_layernorm.weight"),
        ("language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.1.mlp.experts.7.w1.weight", "model.layers.1.mlp.experts.7.gate_proj.weight"),
        ("model.layers.1.mlp.experts.7.w3.weight_packed", "model.layers.1.mlp.experts.7.up_proj.weight_packed"),
        ("model.layers.1.mlp.shared_experts.w2.weight", "model.layers.1.mlp.shared_experts.down_proj.weight"),
        ("vision_tower.blocks.0.w1.weight", "vision_tower.blocks.0.w1.weight"),
        ("model.layers.1.mlp.experts.7.up_proj.weight", "model.layers.1.mlp.experts.7.up_proj.weight"),
    ],
)
def test_spellings_of_tensor_names(written: str, read: str) -> None:
    assert canonical_name(written) == read


def test_deepseek_v32_keeps_an_index_key_beside_the_latent_row() -> None:
    description = describe(V32)
    assert (description.kv.key_width, description.kv.value_width) == (512 + 64 + 128, 512)
    index = details_of(description).latent.indexer
    assert index is not None and index.top_k == 2048 and not index.is_interleaved and all(index.owners)
    shapes = expected_tensors(description)
    assert shapes["model.layers.60.self_attn.indexer.wq_b.weight"] == (64 * 128, 1536)
    assert shapes["model.layers.60.self_attn.indexer.wk.weight"] == (128, 7168)
    assert shapes["model.layers.60.self_attn.indexer.weights_proj.weight"] == (64, 7168)
    assert shapes["model.layers.60.self_attn.indexer.k_norm.bias"] == (128,)


@pytest.mark.parametrize(
    ("keys", "owners"),
    [
        ({}, [True] * 6),
        ({"indexer_types": ["full", "shared", "shared", "full", "shared", "full"]}, [1, 0, 0, 1, 0, 1]),
        ({"index_topk_pattern": "FSSFSS"}, [1, 0, 0, 1, 0, 0]),
        ({"index_topk_freq": 2}, [1, 1, 0, 1, 0, 1]),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, [1, 0, 0, 1, 0, 0]),
    ],
)
def test_layers_that_share_a_choice_of_keys(keys: dict[str, Any], owners: list[int]) -> None:
    config = {**V32, "architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 6, **keys}
    index = details_of(describe(config)).latent.indexer
    assert index is not None and index.is_interleaved
    assert list(index.owners) == [bool(owns) for owns in owners]
    named = [name for name in expected_tensors(describe(config)) if "indexer.wk" in name]
    assert len(named) == sum(owners)


def test_glm_lite_needs_no_head_dim_and_may_list_its_sparse_layers() -> None:
    """2048 is no multiple of 20 heads: the size of a head follows from its parts."""
    kinds = ["dense", "sparse"] * 23 + ["sparse"]
    description = describe({**GLM_LITE, "mlp_layer_types": kinds})
    moe = details_of(description).moe
    assert moe is not None and moe.sparse_layers == tuple(kind == "sparse" for kind in kinds)
    assert details_of(description).latent.scale == pytest.approx(1 / 16)


def test_no_routed_experts_means_dense_layers() -> None:
    description = describe({**V3, "n_routed_experts": None})
    assert details_of(description).moe is None
    assert not [name for name in expected_tensors(description) if ".experts." in name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, "'kv_lora_rank' must be a positive integer"),
        ({"qk_rope_head_dim": 63}, "rotated elements"),
        ({"topk_method": "greedy"}, "'topk_method' must be 'noaux_tc'"),
        ({"scoring_func": "softmax"}, "'scoring_func' must be 'sigmoid'"),
        ({"n_shared_experts": -1}, "n_shared_experts"),
        ({"n_group": 7}, "256 experts are not divisible by n_group 7"),
        ({"topk_group": 9}, "topk_group 9 is more than n_group 8"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok 300 is more than the 256 experts"),
        ({"mlp_layer_types": ["dense"]}, "'mlp_layer_types' must be a list of 61"),
        ({"mlp_layer_types": [["dense"]] * 61}, "'mlp_layer_types' must be a list of 61"),
        ({"hidden_act": "gelu"}, "'hidden_act' must be 'silu'"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope'"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "DeepseekV4ForCausalLM is not served"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        describe({**V3, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lora_rank": None}, "'q_lora_rank' must be a positive integer"),
        ({"index_head_dim": 32}, r"'index_head_dim' must be at least qk_rope_head_dim \(64\)"),
        ({"index_topk": 0}, "'index_topk' must be a positive integer"),
        ({"index_topk_pattern": "SF" * 30 + "F"}, "the first layer has no indexer"),
        ({"index_topk_pattern": "FS"}, "'index_topk_pattern' must be 61 entries"),
        ({"indexer_types": ["full"] * 60 + ["half"]}, "'indexer_types' must be 61 entries"),
        ({"indexer_types": ["full"] * 60 + [["full"]]}, "'indexer_types' must be 61 entries"),
    ],
)
def test_indexers_that_cannot_be_served_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        describe({**V32, **changes})
