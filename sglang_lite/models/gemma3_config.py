"""Gemma 3, alone or in the multimodal model: four norms a layer, a window in most layers. Free of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sglang_lite.layers.rope_parameters import RopeParameters
from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.decoder_config import describe_decoder, layer_kinds, text_config
from sglang_lite.models.dense_names import Shapes, attention_tensors, decoder_tensors, mlp_tensors
from sglang_lite.models.family import Family
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.rope_config import read_rope

FEED_FORWARD_NORMS = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")

_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "pad_token_id": 0,
    }
)
"""Published configurations leave out what has these values."""

_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_PATTERN = 6
"""Every sixth layer sees all keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Details:
    """What the family has beside a plain decoder.

    Attributes:
        local_rope: rotary parameters of the layers with a window; ``ModelDescription.rope`` is that of the others.
        scale: factor on attention scores.
        score_cap, logit_cap: c of c * tanh(x / c) on attention scores and on the final logits; None without.
    """

    local_rope: RopeParameters
    scale: float
    score_cap: float | None
    logit_cap: float | None


def describe_wrapped(config: ConfigReader, generation: ConfigReader, architecture: str) -> ModelDescription:
    """The text part of the multimodal model."""
    return dataclasses.replace(describe(text_config(config), generation, architecture), is_wrapped=True)


def describe(config: ConfigReader, generation: ConfigReader, architecture: str) -> ModelDescription:
    """See ``Family.describe``."""
    config = dataclasses.replace(config, values={**_DEFAULTS, **config.values})
    if config.boolean("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "false: the text model is causal")
    whole, local = _rope_of_layers(config)
    plain = describe_decoder(
        whole, generation, architecture, activation="gelu_pytorch_tanh", activation_key="hidden_activation"
    )
    has_bias = config.boolean("attention_bias", False)
    return dataclasses.replace(
        plain,
        context_length=config.integer("max_position_embeddings"),  # the scaling is in it already
        qkv_bias=has_bias,
        output_bias=has_bias,
        query_key_norm=True,
        sliding_windows=_windows(config, plain.num_layers),
        details=Gemma3Details(
            local_rope=read_rope(local, plain.head_dim),
            scale=config.number("query_pre_attn_scalar") ** -0.5,
            score_cap=_optional_number(config, "attn_logit_softcapping"),
            logit_cap=_optional_number(config, "final_logit_softcapping"),
        ),
    )


def _rope_of_layers(config: ConfigReader) -> tuple[ConfigReader, ConfigReader]:
    """The configuration as layers with all keys and as layers with a window would have it alone.

    The newer form states ``rope_parameters`` for each kind of layer; in the older one ``rope_theta`` and
    ``rope_scaling`` are those of the layers with all keys, and the others have ``rope_local_base_freq``.
    """
    nested = config.values.get("rope_parameters")
    if isinstance(nested, Mapping) and ("full_attention" in nested or "sliding_attention" in nested):
        kinds = [_with_rope(config, nested.get(kind)) for kind in ("full_attention", "sliding_attention")]
        return kinds[0], kinds[1]
    whole = dataclasses.replace(config, values={"rope_theta": _THETA, **config.values})
    local_theta = config.number("rope_local_base_freq", _LOCAL_THETA)
    return whole, _with_rope(config, {"rope_type": "default", "rope_theta": local_theta})


def _with_rope(config: ConfigReader, rope: Any) -> ConfigReader:
    return dataclasses.replace(config, values={**config.values, "rope_parameters": rope, "rope_scaling": None})


def _windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    window = config.integer("sliding_window")
    kinds = layer_kinds(config, num_layers, ("full_attention", "sliding_attention"))
    if kinds is None:
        key = "sliding_window_pattern" if "sliding_window_pattern" in config.values else "_sliding_window_pattern"
        pattern = config.integer(key, _PATTERN)
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _optional_number(config: ConfigReader, key: str) -> float | None:
    return None if config.values.get(key) is None else config.number(key)


def details_of(description: ModelDescription) -> Gemma3Details:
    """The details of a description that this family made."""
    if not isinstance(description.details, Gemma3Details):
        raise TypeError(f"{description.architecture} was not described by this family")
    return description.details


def expected_tensors(description: ModelDescription) -> Shapes:
    """name -> shape of every tensor the model reads."""
    norms: Shapes = dict.fromkeys(FEED_FORWARD_NORMS, (description.hidden_size,))
    block = attention_tensors(description) | norms | mlp_tensors(description)
    return decoder_tensors(description, lambda layer: block)


def canonical_name(name: str) -> str:
    """Checkpoints of the multimodal model put ``language_model`` before or behind ``model``."""
    for prefix, canonical in (
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ):
        if name.startswith(prefix):
            return canonical + name.removeprefix(prefix)
    return name


MODULE = "sglang_lite.models.gemma3"
GEMMA3 = Family(
    architectures=("Gemma3ForCausalLM",),
    describe=describe,
    expected_tensors=expected_tensors,
    module=MODULE,
    canonical_name=canonical_name,
)
GEMMA3_WRAPPED = Family(
    architectures=("Gemma3ForConditionalGeneration",),
    describe=describe_wrapped,
    expected_tensors=expected_tensors,
    module=MODULE,
    canonical_name=canonical_name,
)
