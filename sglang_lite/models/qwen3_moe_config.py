"""Qwen3-MoE: Qwen3 with experts in some or all layers. Free of torch."""

from __future__ import annotations

import dataclasses

from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.decoder_config import describe_decoder
from sglang_lite.models.dense_config import WindowRule, sliding_windows
from sglang_lite.models.family import Family
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.moe_config import (
    MoEDescription,
    check_moe,
    expected_tensors,
    experts_per_token,
    number_of_experts,
)


def describe(config: ConfigReader, generation: ConfigReader, architecture: str) -> ModelDescription:
    """See ``Family.describe``."""
    plain = describe_decoder(config, generation, architecture)
    has_bias = config.boolean("attention_bias", False)
    return dataclasses.replace(
        plain,
        qkv_bias=has_bias,
        output_bias=has_bias,
        query_key_norm=True,
        sliding_windows=sliding_windows(WindowRule.UPPER_LAYERS, config, plain.num_layers),
        details=read_softmax_moe(config, plain.num_layers),
    )


def read_softmax_moe(config: ConfigReader, num_layers: int) -> MoEDescription:
    """Experts chosen by a softmax over all of them.

    A layer is dense when ``mlp_only_layers`` names it or ``decoder_sparse_step`` does not fall on it.
    """
    step = config.integer("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise config.error("mlp_only_layers", "a list of layer indices")
    moe = MoEDescription(
        num_experts=number_of_experts(config),
        top_k=experts_per_token(config),
        intermediate_size=config.integer("moe_intermediate_size"),
        sparse_layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        renormalize=config.boolean("norm_topk_prob", False),
    )
    return check_moe(config, moe)


QWEN3_MOE = Family(
    architectures=("Qwen3MoeForCausalLM",),
    describe=describe,
    expected_tensors=expected_tensors,
    module="sglang_lite.models.moe_decoder",
)
