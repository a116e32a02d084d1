"""ModelDescription: everything known of a model before its weights are read. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_lite.layers.rope_parameters import RopeParameters
from sglang_lite.models.config_files import ConfigReader, read_generation_config, read_model_config
from sglang_lite.models.families import DenseFamily, WindowRule, resolve_architecture
from sglang_lite.models.rope_config import extended_context_length, read_rope
from sglang_lite.types import StartupError

GENERATION_DEFAULT_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that generation_config.json may set a default for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A dense decoder as config.json and generation_config.json describe it.

    Attributes:
        architecture: the entry of ``architectures`` that is served.
        model_type: ``model_type`` of config.json.
        num_layers, num_heads, num_kv_heads, head_dim, hidden_size, intermediate_size, vocab_size: extents.
        context_length: positions the model is made for, scaling included.
        rms_norm_eps: epsilon of every norm.
        rope: rotary parameters.
        tie_word_embeddings: the output projection is the embedding matrix.
        qkv_bias, output_bias, mlp_bias: which projections carry a bias.
        query_key_norm: q and k are normalised per head.
        sliding_windows: per layer, the keys a query sees (itself included), or None for all.
        eos_token_ids: ids that end generation, of both files, in order and without repetition.
        bos_token_id, pad_token_id: None where the config names none.
        dtype: element type of the published weights ("bfloat16", ...), None when not stated.
        generation_defaults: sampling defaults of generation_config.json (``GENERATION_DEFAULT_KEYS``).
    """

    architecture: str
    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeParameters
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norm: bool
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    dtype: str | None
    generation_defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def sliding_window(self) -> int | None:
        """The widest window when every layer has one, else None: how far back a token can still matter."""
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if windows and len(windows) == self.num_layers else None


def read_description(directory: Path | str, overrides: Mapping[str, Any] | None = None) -> ModelDescription:
    """Describe the model in a directory.

    Args:
        directory: holds config.json and perhaps generation_config.json.
        overrides: top-level keys that replace those of config.json (``--json-model-override-args``).

    Raises:
        StartupError: the configuration is absent, malformed or not supported; the message says which field.
    """
    directory = Path(directory)
    config = read_model_config(directory, overrides)
    return describe(config, read_generation_config(directory), source=str(directory / "config.json"))


def describe(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, source: str = "config.json"
) -> ModelDescription:
    """As ``read_description``, from parsed files; ``source`` names config.json in messages."""
    family = resolve_architecture(config, source=source)
    reader = ConfigReader(config, source)
    generation_reader = ConfigReader(generation or {}, str(Path(source).parent / "generation_config.json"))
    _refuse_unsupported(reader)
    num_layers = reader.integer("num_hidden_layers")
    num_heads, num_kv_heads, head_dim = _head_counts(reader)
    eos = (*reader.token_ids("eos_token_id"), *generation_reader.token_ids("eos_token_id"))
    return ModelDescription(
        architecture=family.architecture,
        model_type=str(config.get("model_type", "")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        vocab_size=reader.integer("vocab_size"),
        context_length=extended_context_length(reader),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=read_rope(reader, head_dim),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        qkv_bias=_bias(family.qkv_bias, reader),
        output_bias=_bias(family.output_bias, reader),
        mlp_bias=_bias(family.mlp_bias, reader),
        query_key_norm=family.query_key_norm,
        sliding_windows=_sliding_windows(family, reader, num_layers),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=next(iter(reader.token_ids("bos_token_id")), None),
        pad_token_id=next(iter(reader.token_ids("pad_token_id")), None),
        dtype=_dtype(config),
        generation_defaults=_generation_defaults(generation_reader),
    )


def _refuse_unsupported(reader: ConfigReader) -> None:
    quantization = reader.values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, Mapping) else quantization
        raise StartupError(
            f"{reader.source}: quantization method {method!r} (quantization_config) is not supported on this device; "
            f"use an unquantized checkpoint (float32, bfloat16 or float16)"
        )
    activation = reader.values.get("hidden_act", "silu")
    if activation != "silu":
        raise reader.error("hidden_act", "'silu' for this architecture")


def _head_counts(reader: ConfigReader) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size)."""
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise StartupError(
            f"{reader.source}: num_attention_heads {num_heads} is not divisible by num_key_value_heads {num_kv_heads}"
        )
    head_dim = reader.optional_integer("head_dim")
    if head_dim is None:
        hidden_size = reader.integer("hidden_size")
        if hidden_size % num_heads:
            raise StartupError(
                f"{reader.source}: hidden_size {hidden_size} is not divisible by num_attention_heads {num_heads} "
                f"and there is no head_dim"
            )
        head_dim = hidden_size // num_heads
    return num_heads, num_kv_heads, head_dim


def _bias(rule: bool | str, reader: ConfigReader) -> bool:
    return reader.boolean(rule, False) if isinstance(rule, str) else rule


def _sliding_windows(family: DenseFamily, reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    window = reader.optional_integer("sliding_window")
    first_windowed = 0
    if family.window is WindowRule.UPPER_LAYERS:
        window = window if reader.boolean("use_sliding_window", False) else None
        first_windowed = _layer_index(reader, "max_window_layers", num_layers)
    if family.window is WindowRule.NONE or window is None:
        return (None,) * num_layers
    kinds = reader.values.get("layer_types")
    if kinds is None or family.window is WindowRule.EVERY_LAYER:
        return tuple(window if layer >= first_windowed else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise reader.error("layer_types", f"a list of {num_layers} entries, one a layer")
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise reader.error("layer_types", "a list of 'full_attention' and 'sliding_attention'")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _layer_index(reader: ConfigReader, key: str, num_layers: int) -> int:
    """An index that may be 0; absent means past the last layer."""
    value = reader.values.get(key)
    if value is None:
        return num_layers
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise reader.error(key, "a layer index (0 or more)")
    return value


def _dtype(config: Mapping[str, Any]) -> str | None:
    value = config.get("dtype") or config.get("torch_dtype")
    return value.removeprefix("torch.") if isinstance(value, str) else None


def _generation_defaults(reader: ConfigReader) -> dict[str, float]:
    defaults: dict[str, float] = {}
    for key in GENERATION_DEFAULT_KEYS:
        value = reader.values.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[key] = value
    return defaults
