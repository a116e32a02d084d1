"""From a model directory's configuration files to its ModelDescription. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_lite.models.config_files import ConfigReader, read_generation_config, read_model_config
from sglang_lite.models.families import resolve_architecture
from sglang_lite.models.model_description import ModelDescription

__all__ = ["ModelDescription", "describe", "read_description"]


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
    architecture, family = resolve_architecture(config, source=source)
    generation_reader = ConfigReader(generation or {}, str(Path(source).parent / "generation_config.json"))
    return family.describe(ConfigReader(config, source), generation_reader, architecture)
