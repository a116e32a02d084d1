"""Qwen3-Next, Qwen3.5 and Qwen3.5-MoE: gated delta nets, and gated full attention in every few layers.

Free of torch. The two generations differ in how the input projections of the delta net are stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from sglang_lite.layers.delta_shape import DeltaShape
from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.decoder_config import describe_decoder, layer_kinds, text_config
from sglang_lite.models.dense_names import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix
from sglang_lite.models.family import Family
from sglang_lite.models.hybrid_config import HybridDetails, hybrid_details, with_hybrid_layers
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.moe_config import MoEDescription, gated_block_tensors, moe_tensors
from sglang_lite.types import StartupError

_PARTIAL_ROTARY = 0.25
_FULL_ATTENTION_INTERVAL = 4

Shapes = dict[str, tuple[int, ...]]
DeltaTensors = Callable[[int, DeltaShape], Shapes]
"""(hidden size, heads) -> name -> shape of the input projections of a delta net, behind ``linear_attn.``."""


def _projections_by_key_head(hidden: int, delta: DeltaShape) -> Shapes:
    return {
        "in_proj_qkvz.weight": (delta.conv_channels + delta.value_width, hidden),
        "in_proj_ba.weight": (2 * delta.num_value_heads, hidden),
    }


def _flat_projections(hidden: int, delta: DeltaShape) -> Shapes:
    return {
        "in_proj_qkv.weight": (delta.conv_channels, hidden),
        "in_proj_z.weight": (delta.value_width, hidden),
        "in_proj_b.weight": (delta.num_value_heads, hidden),
        "in_proj_a.weight": (delta.num_value_heads, hidden),
    }


def describe(config: ConfigReader, generation: ConfigReader, architecture: str) -> ModelDescription:
    """See ``Family.describe``; for configurations of the decoder alone."""
    defaults = {"partial_rotary_factor": _PARTIAL_ROTARY}
    if config.values.get("intermediate_size") is None and config.values.get("moe_intermediate_size") is not None:
        defaults["intermediate_size"] = config.values["moe_intermediate_size"]  # no layer is dense
    config = dataclasses.replace(config, values={**defaults, **config.values})
    plain = describe_decoder(config, generation, architecture)
    has_bias = config.boolean("attention_bias", False)
    plain = dataclasses.replace(plain, qkv_bias=has_bias, output_bias=has_bias, query_key_norm=True)
    details = HybridDetails(
        full_attention=_full_attention(config, plain.num_layers),
        delta=_delta_shape(config),
        moe=_moe(config, plain.num_layers),
    )
    return with_hybrid_layers(plain, plain.kv, details, config)


def describe_wrapped(config: ConfigReader, generation: ConfigReader, architecture: str) -> ModelDescription:
    """See ``Family.describe``; for configurations with the decoder in ``text_config``."""
    return dataclasses.replace(describe(text_config(config), generation, architecture), is_wrapped=True)


def _full_attention(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    kinds = layer_kinds(config, num_layers, ("full_attention", "linear_attention"))
    if kinds is not None:
        return tuple(kind == "full_attention" for kind in kinds)
    interval = config.integer("full_attention_interval", _FULL_ATTENTION_INTERVAL)
    return tuple((layer + 1) % interval == 0 for layer in range(num_layers))


def _delta_shape(config: ConfigReader) -> DeltaShape:
    key_heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise StartupError(
            f"{config.source}: linear_num_value_heads {value_heads} is not divisible by "
            f"linear_num_key_heads {key_heads}"
        )
    kernel = config.integer("linear_conv_kernel_dim", 4)
    if kernel < 2:
        raise config.error("linear_conv_kernel_dim", "2 or more")
    return DeltaShape(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        conv_kernel=kernel,
    )


def _moe(config: ConfigReader, num_layers: int) -> MoEDescription | None:
    if not config.values.get("num_experts"):
        return None
    step = config.integer("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.error("mlp_only_layers", "a list of layer indices")
    return MoEDescription(
        num_experts=config.integer("num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        sparse_layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        renormalize=config.boolean("norm_topk_prob", True),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size"),
        shared_name="shared_expert",
        has_shared_gate=True,
    )


def _expected_tensors(description: ModelDescription, projections: DeltaTensors) -> Shapes:
    details, hidden = hybrid_details(description), description.hidden_size
    shapes: Shapes = {EMBEDDING: (description.vocab_size, hidden)}
    for layer in range(description.num_layers):
        tensors: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        if details.full_attention[layer]:
            tensors |= _attention_tensors(description)
        else:
            tensors |= {
                f"linear_attn.{name}": shape
                for name, shape in _delta_tensors(hidden, details.delta, projections).items()
            }
        if details.moe is not None and details.moe.sparse_layers[layer]:
            tensors |= moe_tensors(hidden, details.moe)
        else:
            tensors |= gated_block_tensors("mlp.", hidden, description.intermediate_size)
        shapes |= {layer_prefix(layer) + name: shape for name, shape in tensors.items()}
    shapes[FINAL_NORM] = (hidden,)
    if not description.tie_word_embeddings:
        shapes[LM_HEAD] = (description.vocab_size, hidden)
    return shapes


def _attention_tensors(description: ModelDescription) -> Shapes:
    hidden, size = description.hidden_size, description.head_dim
    query, key_value = description.num_heads * size, description.num_kv_heads * size
    shapes: Shapes = {}
    for name, rows, columns in (
        ("q_proj", 2 * query, hidden),
        ("k_proj", key_value, hidden),
        ("v_proj", key_value, hidden),
        ("o_proj", hidden, query),
    ):
        shapes[f"self_attn.{name}.weight"] = (rows, columns)
        if description.qkv_bias:
            shapes[f"self_attn.{name}.bias"] = (rows,)
    return shapes | {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}


def _delta_tensors(hidden: int, delta: DeltaShape, projections: DeltaTensors) -> Shapes:
    return {
        **projections(hidden, delta),
        "conv1d.weight": (delta.conv_channels, 1, delta.conv_kernel),
        "A_log": (delta.num_value_heads,),
        "dt_bias": (delta.num_value_heads,),
        "norm.weight": (delta.value_dim,),
        "out_proj.weight": (hidden, delta.value_width),
    }


def _without_wrapper(name: str) -> str:
    """``model.language_model.`` is how a wrapper spells the decoder's ``model.``."""
    prefix = "model.language_model."
    return f"model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name


QWEN3_NEXT = Family(
    architectures=("Qwen3NextForCausalLM",),
    describe=describe,
    expected_tensors=lambda description: _expected_tensors(description, _projections_by_key_head),
    module="sglang_lite.models.qwen3_next",
)
QWEN3_5 = Family(
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    describe=describe,
    expected_tensors=lambda description: _expected_tensors(description, _flat_projections),
    module="sglang_lite.models.qwen3_5",
)
QWEN3_5_WRAPPED = Family(
    architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    describe=describe_wrapped,
    expected_tensors=QWEN3_5.expected_tensors,
    module=QWEN3_5.module,
    canonical_name=_without_wrapper,
)
