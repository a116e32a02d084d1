"""From a parameter written as plain text to JSON, by what the function's schema says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_lite.frontend.parsing.values import value_of

_KINDS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
_PYTHON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array"}
_MAX_BRANCHES = 64

_TEXT_LIMITS = ("enum", "const", "pattern", "format", "minLength", "maxLength")

TEXT_ONLY = frozenset({"string"})


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that parameter ``name`` may have; empty when the schema does not say.

    Args:
        schema: of the parameters of a function.
    """
    properties = schema.get("properties")
    described = properties.get(name) if isinstance(properties, Mapping) else None
    return frozenset(_types(described, 0))


def is_limited_text(schema: Mapping[str, Any], name: str) -> bool:
    """Whether parameter ``name`` is a text of which not every one is allowed, so that white space around it counts."""
    properties = schema.get("properties")
    described = properties.get(name) if isinstance(properties, Mapping) else None
    return isinstance(described, Mapping) and any(word in described for word in _TEXT_LIMITS)


def limited_text(text: str, schema: Mapping[str, Any], name: str) -> str:
    """``text`` without the white space around it, unless the schema names it as it is."""
    described = schema["properties"][name]
    named = described.get("enum") if isinstance(described.get("enum"), list) else [described.get("const")]
    return text if text in named else text.strip()


def _types(schema: object, depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > 4:
        return
    kind = schema.get("type")
    for item in kind if isinstance(kind, list) else [kind]:
        if isinstance(item, str):
            yield _PYTHON_TYPES.get(item, item)
    if kind is None:
        enumerated = schema.get("enum")
        if isinstance(enumerated, list):
            yield from (_kind(json.dumps(item)) for item in enumerated[:_MAX_BRANCHES])
        for word in ("anyOf", "oneOf"):
            branches = schema.get(word)
            for branch in branches[:_MAX_BRANCHES] if isinstance(branches, list) else []:
                yield from _types(branch, depth + 1)


def _kind(value: str) -> str:
    """The type of a JSON text."""
    return _KINDS.get(value[0]) or ("number" if set(".eE") & set(value) else "integer")


def parameter_json(text: str, types: frozenset[str], *, untyped_is_text: bool) -> str:
    """The JSON of a parameter.

    Text that is no value of any of ``types`` stays text: the function then says what is wrong with it.
    """
    if types == TEXT_ONLY or (not types and untyped_is_text):
        return json.dumps(text, ensure_ascii=False)
    bare = text.strip()
    for python in (False, True):
        value = value_of(bare, python=python)
        if value is not None and _fits(value, types):
            return value
    return json.dumps(text, ensure_ascii=False)


def _fits(value: str, types: frozenset[str]) -> bool:
    kind = _kind(value)
    return not types or kind in types or (kind == "integer" and "number" in types)
