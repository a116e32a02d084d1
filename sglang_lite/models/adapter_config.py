"""Low-rank adapters as PEFT saves them: what adapter_config.json says. Free of torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_lite.models.config_files import ConfigReader, read_json_object
from sglang_lite.types import StartupError

CONFIG_NAME = "adapter_config.json"

_ABSENT = {
    "modules_to_save": "whole modules beside the low-rank matrices",
    "use_dora": "weight-decomposed adapters (DoRA)",
    "lora_bias": "biases of the low-rank matrices",
    "fan_in_fan_out": "matrices stored with inputs first",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "changed token embeddings",
    "target_parameters": "adapters of fused expert parameters",
    "megatron_config": "Megatron adapters",
}
"""Keys that must be absent, null, false or empty, and what they would ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What is known of an adapter before its tensors are read.

    Attributes:
        directory: where it lies.
        rank, alpha: of every projection but those of the patterns.
        square_root: the scaling is alpha / sqrt(rank) instead of alpha / rank.
        rank_patterns, alpha_patterns: regular expression of a module's name -> its own value.
        target_modules: last parts of the names of the adapted projections; None where the file says it otherwise.
    """

    directory: Path
    rank: int
    alpha: float
    square_root: bool = False
    rank_patterns: Mapping[str, int] = field(default_factory=dict)
    alpha_patterns: Mapping[str, float] = field(default_factory=dict)
    target_modules: frozenset[str] | None = None

    @property
    def max_rank(self) -> int:
        """The largest rank of any projection."""
        return max(self.rank, *self.rank_patterns.values(), 0)

    def rank_of(self, module: str) -> int:
        """Rank of a module, by its name."""
        return next((rank for pattern, rank in self.rank_patterns.items() if _names(pattern, module)), self.rank)

    def scaling_of(self, module: str) -> float:
        """What the product of a module's matrices is multiplied by."""
        alpha = next((alpha for pattern, alpha in self.alpha_patterns.items() if _names(pattern, module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.square_root else rank)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """adapter_config.json of a directory.

    Raises:
        StartupError: it is absent, malformed or asks for something that is not supported; names the field.
    """
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise StartupError(f"cannot read adapter: there is no {CONFIG_NAME} in {directory}")
    config = ConfigReader(read_json_object(path, "adapter config"), str(path))
    if str(config.values.get("peft_type", "LORA")).upper() != "LORA":
        raise config.error("peft_type", "'LORA'")
    for key, meaning in _ABSENT.items():
        if config.values.get(key):
            raise config.error(key, f"absent or empty: {meaning} are not supported")
    if config.values.get("bias", "none") != "none":
        raise config.error("bias", "'none'")
    return AdapterConfig(
        directory=directory,
        rank=config.integer("r"),
        alpha=config.number("lora_alpha"),
        square_root=config.boolean("use_rslora", False),
        rank_patterns={
            pattern: patterns.integer(pattern)
            for patterns in _patterns(config, "rank_pattern")
            for pattern in patterns.values
        },
        alpha_patterns={
            pattern: patterns.number(pattern)
            for patterns in _patterns(config, "alpha_pattern")
            for pattern in patterns.values
        },
        target_modules=_target_modules(config),
    )


def _patterns(config: ConfigReader, key: str) -> list[ConfigReader]:
    """The object of patterns, if there is one."""
    value: Any = config.values.get(key)
    if not value:
        return []
    if not isinstance(value, Mapping):
        raise config.error(key, "an object of module names")
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise StartupError(
                f"{config.source}: '{key}' holds the invalid regular expression {pattern!r}: {error}"
            ) from error
    return [ConfigReader(value, config.source, f"{key}.")]


def _target_modules(config: ConfigReader) -> frozenset[str] | None:
    value = config.values.get("target_modules")
    if not isinstance(value, list):
        return None
    if not all(isinstance(name, str) for name in value):
        raise config.error("target_modules", "a list of module names")
    return frozenset(name.rpartition(".")[2] for name in value)


def _names(pattern: str, module: str) -> bool:
    """Whether a pattern names a module: it may leave out what stands before it, but only at a dot."""
    return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
