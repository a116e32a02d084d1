"""Rotary parameters from config.json, in both of its generations.

Old: ``rope_theta`` and ``rope_scaling: {type | rope_type, ...}`` at the top level. New: one ``rope_parameters``
object that holds ``rope_type``, ``rope_theta`` and the values of the scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sglang_lite.layers.rope_parameters import SUPPORTED_ROPE_TYPES, RopeParameters, RopeType
from sglang_lite.models.config_files import ConfigReader
from sglang_lite.types import StartupError

_DEFAULT_THETA = 10_000.0


def read_rope(config: ConfigReader, head_dim: int) -> RopeParameters:
    """Rotary parameters of a model.

    Raises:
        StartupError: an unsupported type, or a value its type needs is absent or wrong.
    """
    rope = _rope_reader(config)
    rope_type = _rope_type(rope)
    theta = rope.number("rope_theta", config.number("rope_theta", _DEFAULT_THETA))
    partial = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * partial)
    if rotary_dim <= 0 or rotary_dim % 2 or rotary_dim > head_dim:
        raise StartupError(
            f"{config.source}: {partial} of head_dim {head_dim} gives {rotary_dim} rotated elements; "
            f"it must be an even number from 2 to head_dim"
        )
    if rope_type == "default":
        return RopeParameters(rope_type="default", theta=theta, rotary_dim=rotary_dim)
    factor = rope.number("factor")
    if rope_type == "linear":
        return RopeParameters(rope_type="linear", theta=theta, rotary_dim=rotary_dim, factor=factor)
    if rope_type == "llama3":
        return _llama3(rope, theta, rotary_dim, factor)
    return _yarn(rope, config, theta, rotary_dim, factor)


def extended_context_length(config: ConfigReader) -> int:
    """``max_position_embeddings`` times the scaling factor where the config states the unscaled length.

    A scaling that names ``original_max_position_embeddings`` says that ``max_position_embeddings`` is the scaled
    length already.
    """
    length = config.integer("max_position_embeddings")
    rope = _rope_reader(config)
    if _rope_type(rope) in ("default", "llama3") or rope.values.get("original_max_position_embeddings") is not None:
        return length
    extended = length * rope.number("factor")
    if extended == math.inf:
        raise rope.error("factor", f"small enough that {length} positions times it are a number")
    return int(extended)


def yarn_score_magnitude(config: ConfigReader) -> float:
    """Factor on attention scores that a scaled rotary embedding asks for beside its cos and sin.

    DeepSeek's form of YaRN states ``mscale_all_dim``: the magnitude of all of a head's elements, those that do not
    rotate included, so that it has to be in the scores (squared, once for the query and once for the key).
    """
    rope = _rope_reader(config)
    if _rope_type(rope) == "default" or not rope.values.get("mscale_all_dim"):
        return 1.0
    return _magnitude(rope.number("factor"), rope.number("mscale_all_dim")) ** 2


def _rope_reader(config: ConfigReader) -> ConfigReader:
    for key in ("rope_parameters", "rope_scaling"):
        value = config.values.get(key)
        if value is not None:
            if not isinstance(value, Mapping):
                raise config.error(key, "an object or null")
            return ConfigReader(value, config.source, f"{key}.")
    return ConfigReader({}, config.source)


def _rope_type(rope: ConfigReader) -> RopeType:
    key = "rope_type" if "rope_type" in rope.values else "type"
    value: Any = rope.values.get(key, "default")
    for supported in SUPPORTED_ROPE_TYPES:
        if value == supported:
            return supported
    raise StartupError(
        f"{rope.source}: rope type {value!r} ('{rope.prefix}{key}') is not supported; "
        f"supported types: {', '.join(SUPPORTED_ROPE_TYPES)}"
    )


def _llama3(rope: ConfigReader, theta: float, rotary_dim: int, factor: float) -> RopeParameters:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"larger than low_freq_factor ({low})")
    return RopeParameters(
        rope_type="llama3",
        theta=theta,
        rotary_dim=rotary_dim,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_length=rope.integer("original_max_position_embeddings"),
    )


def _yarn(rope: ConfigReader, config: ConfigReader, theta: float, rotary_dim: int, factor: float) -> RopeParameters:
    original = rope.optional_integer("original_max_position_embeddings")
    return RopeParameters(
        rope_type="yarn",
        theta=theta,
        rotary_dim=rotary_dim,
        factor=factor,
        original_context_length=original or config.integer("max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        return _magnitude(factor, rope.number("mscale")) / _magnitude(factor, rope.number("mscale_all_dim"))
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, weight: float) -> float:
    """Growth of the attention logits that a context extended ``factor`` times needs (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
