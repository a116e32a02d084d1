"""Reading config.json and generation_config.json, overrides, and typed access to their fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_lite.types import StartupError

_OLD_ROPE_KEYS = ("rope_theta", "rope_scaling")


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """Parse a JSON file that must hold an object.

    Raises:
        StartupError: unreadable, not JSON, or not an object; the message names ``what`` and the path.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read {what} {path}: {error}") from error
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise StartupError(f"cannot parse {what} {path}: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"cannot parse {what} {path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_model_config(directory: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json of a model directory with the overrides of ``--json-model-override-args`` merged in.

    Raises:
        StartupError: there is no readable config.json in the directory.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise StartupError(f"cannot read model config: there is no config.json in {directory}")
    return merge_overrides(read_json_object(path, "model config"), overrides or {})


def read_generation_config(directory: Path) -> dict[str, Any]:
    """generation_config.json of a model directory; empty when there is none.

    Raises:
        StartupError: it exists and cannot be parsed.
    """
    path = directory / "generation_config.json"
    return read_json_object(path, "generation config") if path.is_file() else {}


def merge_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Top-level keys of ``overrides`` replace those of ``config``.

    ``rope_theta`` and ``rope_scaling`` also reach into ``rope_parameters`` when the config uses that newer form,
    which would hide them otherwise. ``text_config`` is merged in the same way, key by key.
    """
    merged = {**config, **overrides}
    inner, inner_overrides = config.get("text_config"), overrides.get("text_config")
    if isinstance(inner, Mapping) and isinstance(inner_overrides, Mapping):
        merged["text_config"] = merge_overrides(inner, inner_overrides)
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_parameters" not in overrides:
        replaced = dict(rope)
        if "rope_scaling" in overrides:
            scaling = overrides["rope_scaling"] or {"rope_type": "default"}
            kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
            replaced = {**kept, **scaling}
        if "rope_theta" in overrides:
            replaced["rope_theta"] = overrides["rope_theta"]
        merged["rope_parameters"] = replaced
        for key in _OLD_ROPE_KEYS:
            if key in overrides:
                del merged[key]
    return merged


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Typed fields of one JSON object. Every error names the file and the field.

    Attributes:
        values: the object.
        source: its file, for messages.
        prefix: path of the object inside the file, "" at the top level.
    """

    values: Mapping[str, Any]
    source: str
    prefix: str = ""

    def error(self, key: str, expected: str) -> StartupError:
        """An error about ``key``; ``expected`` says what is allowed."""
        found = f"got {self.values[key]!r}" if key in self.values else "it is absent"
        return StartupError(f"{self.source}: '{self.prefix}{key}' must be {expected}, {found}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; an absent or null value takes the default."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(key, "a positive integer")
        return value

    def count(self, key: str, most: int) -> int:
        """A positive integer of at most ``most``, for what is listed one by one and would fill the memory."""
        value = self.integer(key)
        if value > most:
            raise self.error(key, f"a positive integer, at most {most}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """A positive integer or None when absent or null."""
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number; an absent or null value takes the default."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(key, "a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false; an absent or null value takes the default."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing: always a tuple. -1 is how some configs write none."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= -1 for token in ids):
            raise self.error(key, "a token id or a list of token ids")
        return tuple(token for token in ids if token >= 0)
