"""What distinguishes the families that share the dense decoder, and which architectures are served.

Free of torch: the front process and the start-up checks use it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sglang_lite.types import StartupError


class WindowRule(enum.Enum):
    """Which layers of a family attend through a sliding window when the configuration sets one."""

    NONE = enum.auto()
    EVERY_LAYER = enum.auto()
    UPPER_LAYERS = enum.auto()
    """Only with ``use_sliding_window``, and only layers from ``max_window_layers`` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFamily:
    """A family on the shared dense decoder: GQA, SwiGLU, RMS norm, neox rotary embedding.

    A bias is True, False, or the key of config.json that decides (absent means False).

    Attributes:
        architecture: entry of ``architectures`` in config.json.
        qkv_bias, output_bias, mlp_bias: which projections carry a bias.
        query_key_norm: RMS norm of q and k per head, before rotation.
        window: which layers use ``sliding_window``.
    """

    architecture: str
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    query_key_norm: bool = False
    window: WindowRule = WindowRule.NONE


LLAMA = DenseFamily(
    architecture="LlamaForCausalLM",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
)
MISTRAL = DenseFamily(
    architecture="MistralForCausalLM",
    window=WindowRule.EVERY_LAYER,
)
QWEN2 = DenseFamily(
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    window=WindowRule.UPPER_LAYERS,
)
QWEN3 = DenseFamily(
    architecture="Qwen3ForCausalLM",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    query_key_norm=True,
    window=WindowRule.UPPER_LAYERS,
)

FAMILIES: Mapping[str, DenseFamily] = MappingProxyType(
    {family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
)


def supported_architectures() -> tuple[str, ...]:
    """Names accepted in ``architectures`` of config.json, sorted."""
    return tuple(sorted(FAMILIES))


def resolve_architecture(config: Mapping[str, Any], *, source: str = "config.json") -> DenseFamily:
    """The family of the first supported entry of ``architectures``.

    Args:
        config: the parsed config.json.
        source: where it came from, for messages.

    Raises:
        StartupError: ``architectures`` is absent, not a list of names, or names no supported architecture.
    """
    requested = config.get("architectures")
    supported = ", ".join(supported_architectures())
    if requested is None or requested == []:
        raise StartupError(
            f"{source} has no 'architectures': model selection requires it. "
            f"Add one of the supported architectures: {supported}."
        )
    if not isinstance(requested, list) or not all(isinstance(name, str) for name in requested):
        raise StartupError(
            f"{source}: 'architectures' must be a list of names, got {requested!r}. "
            f"Supported architectures: {supported}."
        )
    for name in requested:
        if name in FAMILIES:
            return FAMILIES[name]
    raise StartupError(
        f"{source}: no supported architecture among the requested {', '.join(requested)}. "
        f"Supported architectures: {supported}."
    )
