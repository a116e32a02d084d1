"""The families on the shared dense decoder, and what distinguishes them. Free of torch."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.decoder_config import describe_decoder, layer_index, layer_kinds
from sglang_lite.models.dense_names import expected_tensors
from sglang_lite.models.family import Family
from sglang_lite.models.model_description import ModelDescription

MODULE = "sglang_lite.models.dense"


class WindowRule(enum.Enum):
    """Which layers of a family attend through a sliding window when the configuration sets one."""

    NONE = enum.auto()
    EVERY_LAYER = enum.auto()
    UPPER_LAYERS = enum.auto()
    """Only with ``use_sliding_window``, and only layers from ``max_window_layers`` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseRules:
    """A family on the shared dense decoder: GQA, SwiGLU, RMS norm, neox rotary embedding.

    A bias is True, False, or the key of config.json that decides (absent means False).

    Attributes:
        qkv_bias, output_bias, mlp_bias: which projections carry a bias.
        query_key_norm: RMS norm of q and k per head, before rotation.
        window: which layers use ``sliding_window``.
    """

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    query_key_norm: bool = False
    window: WindowRule = WindowRule.NONE

    def describe(self, config: ConfigReader, generation: ConfigReader, architecture: str) -> ModelDescription:
        """See ``Family.describe``."""
        plain = describe_decoder(config, generation, architecture)
        return dataclasses.replace(
            plain,
            qkv_bias=_bias(self.qkv_bias, config),
            output_bias=_bias(self.output_bias, config),
            mlp_bias=_bias(self.mlp_bias, config),
            query_key_norm=self.query_key_norm,
            sliding_windows=sliding_windows(self.window, config, plain.num_layers),
        )


def _bias(rule: bool | str, config: ConfigReader) -> bool:
    return config.boolean(rule, False) if isinstance(rule, str) else rule


def sliding_windows(rule: WindowRule, config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Per layer, the window of ``config`` as the rule applies it, or None for all keys."""
    window = config.optional_integer("sliding_window")
    first_windowed = 0
    if rule is WindowRule.UPPER_LAYERS:
        window = window if config.boolean("use_sliding_window", False) else None
        first_windowed = layer_index(config, "max_window_layers", num_layers)
    if rule is WindowRule.NONE or window is None:
        return (None,) * num_layers
    kinds = None
    if rule is not WindowRule.EVERY_LAYER:
        kinds = layer_kinds(config, num_layers, ("full_attention", "sliding_attention"))
    if kinds is None:
        return tuple(window if layer >= first_windowed else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _family(architecture: str, rules: DenseRules) -> Family:
    return Family(
        architectures=(architecture,), describe=rules.describe, expected_tensors=expected_tensors, module=MODULE
    )


LLAMA = _family(
    "LlamaForCausalLM",
    DenseRules(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
)
MISTRAL = _family("MistralForCausalLM", DenseRules(window=WindowRule.EVERY_LAYER))
QWEN2 = _family("Qwen2ForCausalLM", DenseRules(qkv_bias=True, window=WindowRule.UPPER_LAYERS))
QWEN3 = _family(
    "Qwen3ForCausalLM",
    DenseRules(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        query_key_norm=True,
        window=WindowRule.UPPER_LAYERS,
    ),
)
