"""Tiny random checkpoints made with transformers: one directory a case, small enough to build in a test.

The initializer range is ten times the default and every one-dimensional parameter gets noise, because attention that
is nearly uniform and norms that are all one hide mistakes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT: dict[str, Any] = {
    **_EXPERTS,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_LATENT_YARN = {**_YARN_ROPE, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0}
_DEEPSEEK_V3 = {**_LATENT, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
# Many index heads: with few, several scores are exactly 0 and which of them are kept is left open.
_INDEXER = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 16}

_GLM4 = {
    **_EXPERTS,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "attention_bias": True,
}
_GPT_OSS = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "sliding_window": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
}

_GEMMA3 = {
    "num_hidden_layers": 6,
    "head_dim": 32,
    "sliding_window": 8,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
}

_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
_HYBRID_EXPERTS = {**_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 32}
_RECURRENT: dict[str, Any] = {"tolerance": 2e-4, "recurrent": True}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
    "num_position_embeddings": 16,
}


@dataclass(frozen=True, slots=True)
class TinyCase:
    """A checkpoint: class names in transformers and what differs from ``COMMON``.

    Attributes:
        family: names of the classes begin with it.
        options: of the configuration.
        config: name of the configuration's class, when it is not ``family`` with ``Config`` behind.
        model: name of the model's class, when it is not ``family`` with ``ForCausalLM`` behind.
        wrapper: when the decoder is part of a larger model: the other options of the larger configuration, whose
            ``text_config`` are then ``COMMON`` and ``options``.
        tolerance: most that a logit may differ from transformers.
        recurrent: some layers carry a state, so that pages of a prefix are not enough to go on from.
    """

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    config: str | None = None
    model: str | None = None
    wrapper: dict[str, Any] | None = None
    tolerance: float = 1e-4
    recurrent: bool = False


CASES: dict[str, TinyCase] = {
    "llama": TinyCase("Llama"),
    "llama_biases": TinyCase("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3_rope": TinyCase("Llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama_linear_rope": TinyCase(
        "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
    ),
    "smollm2": TinyCase(
        "Llama",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, "tie_word_embeddings": True},
    ),
    "mistral": TinyCase("Mistral", {"sliding_window": 8, "head_dim": 16}),
    "mistral_full": TinyCase("Mistral", {"sliding_window": None}),
    "qwen2": TinyCase("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": TinyCase("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": TinyCase("Qwen3", {"head_dim": 32}),
    "qwen3_biases": TinyCase("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3_yarn": TinyCase("Qwen3", {"head_dim": 32, "rope_parameters": _YARN_ROPE}),
    "qwen3_moe": TinyCase(
        "Qwen3Moe",
        {**_EXPERTS, "num_experts": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3_moe_some_dense": TinyCase(
        "Qwen3Moe",
        {**_EXPERTS, "num_hidden_layers": 4, "num_experts": 8, "norm_topk_prob": False}
        | {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "glm4_moe": TinyCase("Glm4Moe", _GLM4),
    "glm4_moe_plain": TinyCase(
        "Glm4Moe",
        {**_GLM4, "use_qk_norm": False, "attention_bias": False, "norm_topk_prob": False, "n_shared_experts": 2}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2},
    ),
    "gpt_oss": TinyCase("GptOss", _GPT_OSS),
    "gpt_oss_plain_rope": TinyCase(
        "GptOss",
        {**_GPT_OSS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "sliding_window": 5}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "gemma3": TinyCase("Gemma3", _GEMMA3, config="Gemma3TextConfig"),
    "gemma3_scaled_capped": TinyCase(
        "Gemma3",
        {**_GEMMA3, "num_hidden_layers": 4, "tie_word_embeddings": False, "final_logit_softcapping": 5.0}
        | {"query_pre_attn_scalar": 20, "layer_types": ["full_attention", "sliding_attention"] * 2}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            }
        },
        config="Gemma3TextConfig",
    ),
    "gemma3_wrapper": TinyCase(
        "Gemma3",
        _GEMMA3,
        model="Gemma3ForConditionalGeneration",
        wrapper={
            "image_token_index": 127,
            "mm_tokens_per_image": 4,
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
            },
        },
    ),
    "qwen3_next": TinyCase("Qwen3Next", {**_HYBRID, **_HYBRID_EXPERTS}, **_RECURRENT),
    "qwen3_next_other_shapes": TinyCase(
        "Qwen3Next",
        {**_HYBRID, **_HYBRID_EXPERTS, "mlp_only_layers": [1], "linear_num_value_heads": 6, "linear_num_key_heads": 2}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 3, "norm_topk_prob": False}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
        **_RECURRENT,
    ),
    "qwen3_5": TinyCase("Qwen3_5", _HYBRID, config="Qwen3_5TextConfig", **_RECURRENT),
    "qwen3_5_moe": TinyCase("Qwen3_5Moe", {**_HYBRID, **_HYBRID_EXPERTS}, config="Qwen3_5MoeTextConfig", **_RECURRENT),
    "qwen3_5_wrapper": TinyCase(
        "Qwen3_5",
        {**_HYBRID, "tie_word_embeddings": True}
        | {"rope_parameters": {**_HYBRID["rope_parameters"], "mrope_section": [1, 1, 2], "mrope_interleaved": True}},
        model="Qwen3_5ForConditionalGeneration",
        wrapper={"vision_config": _QWEN_VISION},
        **_RECURRENT,
    ),
    "qwen3_5_moe_wrapper": TinyCase(
        "Qwen3_5Moe",
        {**_HYBRID, **_HYBRID_EXPERTS},
        model="Qwen3_5MoeForConditionalGeneration",
        wrapper={"vision_config": _QWEN_VISION},
        **_RECURRENT,
    ),
    "deepseek_v2": TinyCase(
        "DeepseekV2", {**_LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0}
    ),
    "deepseek_v2_lite": TinyCase(
        "DeepseekV2",
        {**_LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
        | {"rope_parameters": {**_LATENT_YARN, "mscale": 0.707, "mscale_all_dim": 0.5}, "n_shared_experts": 2},
    ),
    "deepseek_v3": TinyCase("DeepseekV3", _DEEPSEEK_V3),
    "deepseek_v3_yarn": TinyCase(
        "DeepseekV3", {**_DEEPSEEK_V3, "rope_parameters": _LATENT_YARN, "attention_bias": True}
    ),
    "deepseek_v3_half_rotation": TinyCase("DeepseekV3", {**_DEEPSEEK_V3, "rope_interleave": False, "v_head_dim": 40}),
    "kimi_k2": TinyCase(
        "DeepseekV3",
        {**_DEEPSEEK_V3, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
        | {"rope_parameters": {**_LATENT_YARN, "rope_theta": 5e4}},
    ),
    "glm4_moe_lite": TinyCase("Glm4MoeLite", {**_LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8}),
    "deepseek_v32": TinyCase("DeepseekV32", {**_DEEPSEEK_V3, **_INDEXER}),
    "glm_moe_dsa": TinyCase("GlmMoeDsa", {**_DEEPSEEK_V3, **_INDEXER, "n_group": 1, "topk_group": 1}),
    "glm_moe_dsa_shared_choice": TinyCase(
        "GlmMoeDsa", {**_DEEPSEEK_V3, **_INDEXER, "indexer_types": ["full", "shared", "full"]}
    ),
}


def build_model(case: TinyCase, seed: int = 0) -> PreTrainedModel:
    """A random float32 model of a case, in evaluation mode."""
    torch.manual_seed(seed)
    options = {**COMMON, **case.options}
    if case.wrapper is not None:
        options = {"text_config": options, "tie_word_embeddings": options["tie_word_embeddings"], **case.wrapper}
    config = getattr(transformers, case.config or f"{case.family}Config")(**options)
    model: PreTrainedModel = getattr(transformers, case.model or f"{case.family}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if (parameter.dim() == 1 and "inv_freq" not in name) or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            if name.endswith("A_log"):
                # Slow decays, as trained models have them: what is forgotten at once leaves outputs of rounding errors
                # for the norm behind to blow up, in transformers too.
                parameter.uniform_(-3.0, -1.0)
    return model


def save_checkpoint(case: TinyCase, directory: Path, *, max_shard_size: str = "1GB") -> PreTrainedModel:
    """Write config.json and safetensors of a case and return the model they came from."""
    model = build_model(case)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
