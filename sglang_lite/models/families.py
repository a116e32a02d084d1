"""The table of model families: which architectures are served, and which are refused with a reason.

Free of torch: the front process and the start-up checks use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sglang_lite.models.classifier_config import (
    LLAMA_CLASSIFIER,
    MISTRAL_CLASSIFIER,
    QWEN2_CLASSIFIER,
    QWEN3_CLASSIFIER,
    QWEN3_MOE_CLASSIFIER,
)
from sglang_lite.models.deepseek_config import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, GLM_5, KIMI_K25
from sglang_lite.models.dense_config import LLAMA, MISTRAL, QWEN2, QWEN3
from sglang_lite.models.family import Family
from sglang_lite.models.gemma3_config import GEMMA3, GEMMA3_WRAPPED
from sglang_lite.models.glm4_moe_config import GLM4_MOE
from sglang_lite.models.gpt_oss_config import GPT_OSS
from sglang_lite.models.kimi_linear_config import KIMI_LINEAR
from sglang_lite.models.qwen3_moe_config import QWEN3_MOE
from sglang_lite.models.qwen_hybrid_config import QWEN3_5, QWEN3_5_WRAPPED, QWEN3_NEXT
from sglang_lite.types import StartupError

TABLE: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_WRAPPED,
    GLM4_MOE,
    GPT_OSS,
    GEMMA3,
    GEMMA3_WRAPPED,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_5,
    KIMI_K25,
    KIMI_LINEAR,
    LLAMA_CLASSIFIER,
    MISTRAL_CLASSIFIER,
    QWEN2_CLASSIFIER,
    QWEN3_CLASSIFIER,
    QWEN3_MOE_CLASSIFIER,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {architecture: family for family in TABLE for architecture in family.architectures}
)
"""Architecture -> its family."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekV4ForCausalLM": "its layers exchange several residual streams (hyper-connections) and its tensors "
        "have names of their own; neither is implemented",
        "Gemma3nForConditionalGeneration": "its layers exchange several residual streams and have embeddings of their "
        "own, which are not implemented",
        "Llama4ForConditionalGeneration": "its attention in chunks and its scaled queries are not implemented",
    }
)
"""Architectures that people try, and why they are not served."""


def supported_architectures() -> tuple[str, ...]:
    """Names accepted in ``architectures`` of config.json, sorted."""
    return tuple(sorted(FAMILIES))


def resolve_architecture(config: Mapping[str, Any], *, source: str = "config.json") -> tuple[str, Family]:
    """The first supported entry of ``architectures`` and its family.

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
            return name, FAMILIES[name]
    for name in requested:
        if name in REFUSED:
            raise StartupError(
                f"{source}: {name} is not served: {REFUSED[name]}. Supported architectures: {supported}."
            )
    raise StartupError(
        f"{source}: no supported architecture among the requested {', '.join(requested)}. "
        f"Supported architectures: {supported}."
    )
