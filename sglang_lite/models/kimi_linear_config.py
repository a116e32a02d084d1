"""Kimi Linear: delta attention with a decay per channel, and latent attention without rotation in every few layers.

Free of torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from sglang_lite.layers.delta_shape import DeltaShape
from sglang_lite.models import deepseek_config
from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.decoder_config import describe_decoder, is_one_a_layer, layer_index, layer_kinds
from sglang_lite.models.dense_names import Shapes, decoder_tensors, mlp_tensors
from sglang_lite.models.family import Family
from sglang_lite.models.hybrid_config import HybridDetails, hybrid_details, with_hybrid_layers
from sglang_lite.models.latent_config import LatentDescription, latent_tensors, read_latent
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.moe_config import MoEDescription, layers_from, moe_tensors, read_sigmoid_moe

_RENAMED = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
}
"""What other families call a field of this one's configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiLinearDetails(HybridDetails):
    """A hybrid whose full-attention layers keep latent rows."""

    latent: LatentDescription


def kimi_details(description: ModelDescription) -> KimiLinearDetails:
    """The details of a description of this family."""
    details = hybrid_details(description)
    if not isinstance(details, KimiLinearDetails):
        raise TypeError(f"{description.architecture} was not described by this family")
    return details


def describe(config: ConfigReader, generation: ConfigReader, architecture: str) -> ModelDescription:
    """See ``Family.describe``."""
    renamed = {
        ours: config.values[theirs] for ours, theirs in _RENAMED.items() if config.values.get(theirs) is not None
    }
    config = dataclasses.replace(config, values={**config.values, **renamed})
    if config.values.get("mla_use_nope") is False:
        raise config.error("mla_use_nope", "true (latent attention without rotary embedding) for this architecture")
    if config.values.get("moe_router_activation_func", "sigmoid") != "sigmoid":
        raise config.error("moe_router_activation_func", "'sigmoid' for this architecture")
    latent = read_latent(config, rotates=False)
    # head_dim is written as the rotary width here, and there is one latent row for all heads.
    plain_values = {**config.values, "head_dim": latent.rope_dim, "num_key_value_heads": None}
    plain = describe_decoder(dataclasses.replace(config, values=plain_values), generation, architecture)
    details = KimiLinearDetails(
        full_attention=_full_attention(config, plain.num_layers),
        delta=_delta_shape(config),
        moe=_moe(config, plain.num_layers),
        latent=latent,
    )
    plain = dataclasses.replace(plain, num_kv_heads=1, head_dim=latent.row_width)
    return with_hybrid_layers(plain, latent.kv(1), details, config)


def _linear_attention(config: ConfigReader) -> ConfigReader:
    value: Any = config.values.get("linear_attn_config")
    if value is None:
        return ConfigReader({}, config.source, "linear_attn_config.")
    if not isinstance(value, dict):
        raise config.error("linear_attn_config", "an object")
    return ConfigReader(value, config.source, "linear_attn_config.")


def _full_attention(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    kinds = layer_kinds(config, num_layers, ("full_attention", "linear_attention"))
    if kinds is not None:
        return tuple(kind == "full_attention" for kind in kinds)
    linear = _linear_attention(config)
    full, delta = linear.values.get("full_attn_layers"), linear.values.get("kda_layers")
    if not isinstance(full, list) or not isinstance(delta, list):
        raise linear.error("full_attn_layers", "a list of layer numbers from 1 on, beside 'kda_layers'")
    if sorted([*full, *delta]) != list(range(1, num_layers + 1)):
        raise linear.error("full_attn_layers", f"together with 'kda_layers' each of the layers 1 to {num_layers} once")
    return tuple(layer + 1 in full for layer in range(num_layers))


def _delta_shape(config: ConfigReader) -> DeltaShape:
    linear = _linear_attention(config)
    num_heads = linear.optional_integer("num_heads") or config.integer("linear_num_heads")
    head_dim = linear.optional_integer("head_dim") or config.integer("linear_head_dim")
    kernel = linear.optional_integer("short_conv_kernel_size") or config.integer("linear_conv_kernel_dim", 4)
    if kernel < 2:
        raise linear.error("short_conv_kernel_size", "2 or more")
    return DeltaShape(
        num_key_heads=num_heads, num_value_heads=num_heads, key_dim=head_dim, value_dim=head_dim, conv_kernel=kernel
    )


def _moe(config: ConfigReader, num_layers: int) -> MoEDescription | None:
    if not config.values.get("num_experts", config.values.get("num_local_experts")):
        return None
    kinds = config.values.get("mlp_layer_types")
    if kinds is None:
        first = layer_index(config, "first_k_dense_replace", 1)
        sparse = layers_from(first, num_layers, step=config.integer("moe_layer_freq", 1))
    elif not is_one_a_layer(kinds, num_layers, ("dense", "sparse")):
        raise config.error("mlp_layer_types", f"a list of {num_layers} entries 'dense' or 'sparse', one a layer")
    else:
        sparse = tuple(kind == "sparse" for kind in kinds)
    return read_sigmoid_moe(config, sparse)


def expected_tensors(description: ModelDescription) -> Shapes:
    """name -> shape of every tensor the model reads, in reading order."""
    details, hidden = kimi_details(description), description.hidden_size

    def blocks(layer: int) -> Shapes:
        if details.full_attention[layer]:
            tensors = latent_tensors(hidden, description.num_heads, details.latent, layer)
        else:
            tensors = _delta_tensors(hidden, details.delta)
        if details.moe is not None and details.is_sparse(layer):
            return tensors | moe_tensors(hidden, details.moe)
        return tensors | mlp_tensors(description)

    return decoder_tensors(description, blocks)


def _delta_tensors(hidden: int, delta: DeltaShape) -> Shapes:
    width, size = delta.value_width, delta.value_dim
    shapes: Shapes = {}
    for name in ("q", "k", "v"):
        shapes[f"{name}_proj.weight"] = (width, hidden)
        shapes[f"{name}_conv1d.weight"] = (width, 1, delta.conv_kernel)
    for name in ("f", "g"):
        shapes[f"{name}_a_proj.weight"] = (size, hidden)
        shapes[f"{name}_b_proj.weight"] = (width, size)
    shapes |= {
        "b_proj.weight": (delta.num_value_heads, hidden),
        "A_log": (1, 1, delta.num_value_heads, 1),
        "dt_bias": (width,),
        "o_norm.weight": (size,),
        "o_proj.weight": (hidden, width),
    }
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def canonical_name(name: str) -> str:
    """The feed-forward block is ``block_sparse_moe`` or ``mlp``, and expert matrices may be w1, w2 and w3."""
    return deepseek_config.canonical_name(name.replace(".block_sparse_moe.", ".mlp."))


KIMI_LINEAR = Family(
    architectures=("KimiLinearForCausalLM",),
    describe=describe,
    expected_tensors=expected_tensors,
    module="sglang_lite.models.kimi_linear",
    canonical_name=canonical_name,
)
