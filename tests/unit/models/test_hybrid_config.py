"""Configurations of models with recurrent layers: what is read, and what is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_lite.layers.delta_shape import DeltaShape
from sglang_lite.models.description import describe
from sglang_lite.models.families import FAMILIES
from sglang_lite.models.hybrid_config import hybrid_details
from sglang_lite.models.kimi_linear_config import kimi_details
from sglang_lite.models.registry import expected_tensors
from sglang_lite.types import StartupError

COMMON: dict[str, Any] = {
    "num_attention_heads": 16,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 151645,
}
QWEN3_NEXT: dict[str, Any] = {
    **COMMON,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5120,
    "max_position_embeddings": 262144,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
KIMI_LINEAR: dict[str, Any] = {
    **COMMON,
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "intermediate_size": 9216,
    "model_max_length": 1048576,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_qwen3_next_as_published() -> None:
    description = describe(QWEN3_NEXT)
    details = hybrid_details(description)
    assert details.delta == DeltaShape(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_kernel=4)
    assert [layer for layer in range(48) if details.full_attention[layer]] == list(range(3, 48, 4))
    assert [details.index_in_kind(layer) for layer in (0, 3, 4, 7, 47)] == [0, 0, 3, 1, 11]
    assert (description.kv.num_layers, description.kv.num_kv_heads, description.kv.key_width) == (12, 2, 256)
    assert description.recurrent is not None
    assert description.recurrent.num_layers == 36
    assert description.recurrent.row_bytes(2) == 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)
    assert description.rope.rotary_dim == 64
    assert details.moe is not None
    assert (details.moe.num_experts, details.moe.top_k, details.moe.renormalize) == (512, 10, True)
    assert all(details.moe.sparse_layers)


def test_the_state_of_the_reference_shape() -> None:
    """Key and value heads 16 x 128, kernel 4: 18,432 and 262,144 elements a layer, 841,728 in three."""
    changes = {"linear_num_value_heads": 16, "num_hidden_layers": 4}
    recurrent = describe({**QWEN3_NEXT, **changes}).recurrent
    assert recurrent is not None
    assert (recurrent.tail_elements, recurrent.state_elements) == (18_432, 262_144)
    assert recurrent.row_bytes(4) == 841_728 * 4


def test_what_may_be_left_out() -> None:
    """Rotated share, interval, kernel and the width of dense layers where there are none."""
    keys = ("partial_rotary_factor", "full_attention_interval", "linear_conv_kernel_dim", "intermediate_size")
    assert describe(without(QWEN3_NEXT, *keys, "norm_topk_prob")) == describe({**QWEN3_NEXT, "intermediate_size": 512})


def test_the_decoder_of_a_wrapper() -> None:
    inner = without(QWEN3_NEXT, "architectures", "eos_token_id")
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": inner, "eos_token_id": 7}
    description = describe(outer)
    assert description.is_wrapped
    assert description.eos_token_ids == (7,)
    assert description.recurrent == describe(QWEN3_NEXT).recurrent
    canonical_name = FAMILIES[description.architecture].canonical_name
    names = ("model.language_model.layers.0.linear_attn.A_log", "lm_head.weight", "model.visual.pos_embed.weight")
    assert [canonical_name(name) for name in names] == ["model.layers.0.linear_attn.A_log", *names[1:]]


def test_generations_store_other_projections() -> None:
    def projections(architecture: str) -> dict[str, tuple[int, ...]]:
        description = describe({**QWEN3_NEXT, "architectures": [architecture], "num_hidden_layers": 4})
        prefix = "model.layers.1.linear_attn.in_proj_"
        return {
            name.removeprefix(prefix): shape
            for name, shape in expected_tensors(description).items()
            if name.startswith(prefix)
        }

    assert projections("Qwen3NextForCausalLM") == {"qkvz.weight": (12288, 2048), "ba.weight": (64, 2048)}
    assert projections("Qwen3_5MoeForCausalLM") == {
        "qkv.weight": (8192, 2048),
        "z.weight": (4096, 2048),
        "b.weight": (32, 2048),
        "a.weight": (32, 2048),
    }


def test_kimi_linear_as_published() -> None:
    description = describe(KIMI_LINEAR)
    details = kimi_details(description)
    assert details.full_attention == (False, False, False, True)
    assert description.context_length == 1048576
    kv = description.kv
    assert (kv.num_layers, kv.num_tensors, kv.key_width, kv.value_width) == (1, 1, 576, 512)
    assert description.recurrent is not None
    assert description.recurrent.conv_channels == 3 * 4096
    assert not details.latent.rotates
    assert details.moe is not None
    assert details.moe.sparse_layers == (False, True, True, True)
    assert (details.moe.scoring, details.moe.scaling, details.moe.shared_intermediate_size) == ("sigmoid", 2.446, 1024)


def test_names_of_kimi_linear_checkpoints() -> None:
    canonical_name = FAMILIES["KimiLinearForCausalLM"].canonical_name
    for given, canonical in (
        ("block_sparse_moe.experts.3.w1.weight", "mlp.experts.3.gate_proj.weight"),
        ("block_sparse_moe.experts.3.w2.weight", "mlp.experts.3.down_proj.weight"),
        ("block_sparse_moe.shared_experts.up_proj.weight", "mlp.shared_experts.up_proj.weight"),
        ("block_sparse_moe.gate_proj.weight", "mlp.gate_proj.weight"),
        ("mlp.gate_proj.weight", "mlp.gate_proj.weight"),
        ("block_sparse_moe.gate.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    ):
        assert canonical_name(f"model.layers.2.{given}") == f"model.layers.2.{canonical}"


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (QWEN3_NEXT, {"linear_num_value_heads": 24}, "linear_num_value_heads 24"),
        (QWEN3_NEXT, {"linear_num_key_heads": 0}, "linear_num_key_heads"),
        (QWEN3_NEXT, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        (QWEN3_NEXT, {"layer_types": ["linear_attention"] * 48}, "0 of 48 layers"),
        (QWEN3_NEXT, {"layer_types": ["full_attention"] * 48}, "48 of 48 layers"),
        (QWEN3_NEXT, {"layer_types": ["full_attention"] * 4}, "layer_types"),
        (QWEN3_NEXT, {"layer_types": ["sliding_attention"] * 48}, "layer_types"),
        (QWEN3_NEXT, {"num_experts_per_tok": 513}, "num_experts_per_tok 513"),
        (QWEN3_NEXT, {"hidden_act": "gelu"}, "hidden_act"),
        (KIMI_LINEAR, {"mla_use_nope": False}, "mla_use_nope"),
        (KIMI_LINEAR, {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        (KIMI_LINEAR, {"linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config.full_attn_layers"),
        (KIMI_LINEAR, {"linear_attn_config": [1]}, "linear_attn_config"),
        (KIMI_LINEAR, {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        (KIMI_LINEAR, {"mlp_layer_types": [["dense"]] * KIMI_LINEAR["num_hidden_layers"]}, "mlp_layer_types"),
        (KIMI_LINEAR, {"num_expert_group": 3}, "n_group 3"),
    ],
)
def test_refusals_name_the_field(config: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError) as caught:
        describe({**config, **changes})
    assert named in str(caught.value)


@pytest.mark.parametrize(("full", "delta"), [([4], [1, 2]), ([4], [1, 2, 3, 4]), ([5], [1, 2, 3]), ([0], [1, 2, 3])])
def test_every_layer_of_kimi_linear_has_one_kind(full: list[int], delta: list[int]) -> None:
    linear = {**KIMI_LINEAR["linear_attn_config"], "full_attn_layers": full, "kda_layers": delta}
    with pytest.raises(StartupError, match="full_attn_layers"):
        describe({**KIMI_LINEAR, "linear_attn_config": linear})
