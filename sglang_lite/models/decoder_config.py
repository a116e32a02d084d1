"""What every family reads of config.json in the same way. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.model_description import KVDescription, ModelDescription
from sglang_lite.models.quantization import read_quantization
from sglang_lite.models.rope_config import extended_context_length, read_rope
from sglang_lite.types import StartupError

GENERATION_DEFAULT_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that generation_config.json may set a default for."""

MOST_LAYERS = 4096
"""Of any model. Published ones have some hundred at most."""


def describe_decoder(
    config: ConfigReader,
    generation: ConfigReader,
    architecture: str,
    *,
    activation: str = "silu",
    activation_key: str = "hidden_act",
) -> ModelDescription:
    """A decoder with grouped key/value heads, no biases, no per-head norms and no windows.

    A family starts from it and replaces (``dataclasses.replace``) what it does otherwise.

    Args:
        config: the object that describes the decoder: config.json, or its ``text_config``.
        generation: generation_config.json.
        architecture: the entry of ``architectures`` that is served.
        activation: the only activation of the feed-forward block that the family has.
        activation_key: where config.json names it; absent means the family's own.

    Raises:
        StartupError: a field is absent, malformed or not supported.
    """
    if config.values.get(activation_key, activation) != activation:
        raise config.error(activation_key, f"{activation!r} for this architecture")
    num_layers = config.count("num_hidden_layers", MOST_LAYERS)
    num_heads, num_kv_heads, head_dim = head_counts(config)
    eos = (*config.token_ids("eos_token_id"), *generation.token_ids("eos_token_id"))
    return ModelDescription(
        architecture=architecture,
        model_type=str(config.values.get("model_type", "")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        context_length=extended_context_length(config),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, head_dim),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        query_key_norm=False,
        sliding_windows=(None,) * num_layers,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
        pad_token_id=next(iter(config.token_ids("pad_token_id")), None),
        dtype=_dtype(config.values),
        kv=KVDescription(num_layers=num_layers, num_kv_heads=num_kv_heads, key_width=head_dim, value_width=head_dim),
        quantization=read_quantization(config),
        generation_defaults=_generation_defaults(generation),
    )


def text_config(config: ConfigReader) -> ConfigReader:
    """The decoder's object inside the configuration of a larger model.

    What ``text_config`` does not name (token ids, element type, tied embeddings) comes from the outer object.

    Raises:
        StartupError: there is no ``text_config`` object.
    """
    inner = config.values.get("text_config")
    if not isinstance(inner, Mapping):
        raise config.error("text_config", "an object, for this architecture")
    outer_keys = (
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "dtype",
        "torch_dtype",
        "tie_word_embeddings",
        "quantization_config",
        "compression_config",
    )
    outer = {key: config.values[key] for key in outer_keys if config.values.get(key) is not None}
    given = {key: value for key, value in inner.items() if value is not None or key not in outer}
    return ConfigReader({**outer, **given}, config.source, "text_config.")


def head_counts(config: ConfigReader) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size)."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise StartupError(
            f"{config.source}: num_attention_heads {num_heads} is not divisible by num_key_value_heads {num_kv_heads}"
        )
    head_dim = config.optional_integer("head_dim")
    if head_dim is None:
        hidden_size = config.integer("hidden_size")
        if hidden_size % num_heads:
            raise StartupError(
                f"{config.source}: hidden_size {hidden_size} is not divisible by num_attention_heads {num_heads} "
                f"and there is no head_dim"
            )
        head_dim = hidden_size // num_heads
    return num_heads, num_kv_heads, head_dim


def layer_kinds(config: ConfigReader, num_layers: int, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
    """``layer_types``, one entry a layer, or None when it is absent.

    Raises:
        StartupError: it is not a list of ``num_layers`` entries of ``allowed``.
    """
    kinds = config.values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.error("layer_types", f"a list of {num_layers} entries, one a layer")
    if not is_one_a_layer(kinds, num_layers, allowed):
        raise config.error("layer_types", f"a list of {' and '.join(repr(kind) for kind in allowed)}")
    return tuple(kinds)


def is_one_a_layer(value: Any, num_layers: int, allowed: tuple[str, ...]) -> bool:
    """Whether a value is a list with one entry of ``allowed`` a layer, whatever else config.json may hold there."""
    return isinstance(value, list) and len(value) == num_layers and all(entry in allowed for entry in value)


def layer_index(config: ConfigReader, key: str, default: int) -> int:
    """A layer index, 0 or more; an absent or null value takes the default."""
    value = config.values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise config.error(key, "a layer index (0 or more)")
    return value


def _dtype(config: Mapping[str, Any]) -> str | None:
    value = config.get("dtype") or config.get("torch_dtype")
    return value.removeprefix("torch.") if isinstance(value, str) else None


def _generation_defaults(generation: ConfigReader) -> dict[str, float]:
    defaults: dict[str, float] = {}
    for key in GENERATION_DEFAULT_KEYS:
        value = generation.values.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[key] = value
    return defaults
