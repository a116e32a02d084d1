"""Keywords of a JSON schema that a grammar library reads past, alone or beside others."""

from __future__ import annotations

from typing import Any

from sglang_lite.grammar.base import GrammarError
from sglang_lite.grammar.endless import resolve_reference

UNENFORCED = frozenset(
    [
        "$dynamicRef",
        "$recursiveRef",
        "additionalItems",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "disallow",
        "divisibleBy",
        "else",
        "extends",
        "if",
        "maxContains",
        "minContains",
        "multipleOf",
        "not",
        "then",
        "uniqueItems",
    ]
)
"""Keywords that are enforced nowhere."""

_OF_NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
_OF_STRINGS = ("format", "maxLength", "minLength", "pattern")
_OF_ARRAYS = ("items", "maxItems", "minItems", "prefixItems", "unevaluatedItems")
_OF_OBJECTS = (
    *("additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties", "propertyNames"),
    *("required", "unevaluatedProperties"),
)
_CONSTRAINTS = frozenset(["type", "enum", "const", *_OF_NUMBERS, *_OF_STRINGS, *_OF_ARRAYS, *_OF_OBJECTS])
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Each of them is the whole of its schema to the library, the first of them that is there."""
_NEEDS_TYPE = frozenset([*_OF_NUMBERS, *_OF_STRINGS, "maxItems", "minItems", "maxProperties", "minProperties"])


def check_reference(part: dict[str, Any], where: str, root: Any) -> None:
    """Refuse a reference that leads nowhere: the library takes it for a schema that allows everything.

    Raises:
        GrammarError: with the JSON pointer ``where``.
    """
    reference = part.get("$ref")
    if "$ref" in part and (not isinstance(reference, str) or resolve_reference(reference, root) is None):
        raise GrammarError(
            f"JSON Schema at {where}/$ref leads nowhere: {str(reference)[:80]!r}; a reference must be a JSON pointer "
            f"into the schema itself, such as #/$defs/name"
        )


def check_combination(part: dict[str, Any], where: str, library: str) -> None:
    """Refuse keywords that are ignored because of another one, or because a type is missing.

    Raises:
        GrammarError: with the JSON pointer ``where``.
    """
    whole = next((name for name in _WHOLE if name in part), None)
    if whole is not None:
        beside = _beside(part, whole)
        if beside:
            raise GrammarError(
                f"JSON Schema at {where} is not supported by {library}: {', '.join(beside)} beside {whole} would be "
                f"ignored; put it into the schema that {whole} gives"
            )
        return
    if "type" not in part and part.keys() & _NEEDS_TYPE:
        limits = ", ".join(sorted(part.keys() & _NEEDS_TYPE))
        raise GrammarError(f"JSON Schema at {where} needs a type: without one {library} would ignore {limits}")
    required, properties = part.get("required"), part.get("properties")
    if isinstance(required, list) and not (isinstance(properties, dict) and all(n in properties for n in required)):
        missing = [name for name in required if not isinstance(properties, dict) or name not in properties]
        if missing:
            raise GrammarError(
                f"JSON Schema at {where}/required names what properties does not have: {str(missing[0])[:80]!r}"
            )


def _beside(part: dict[str, Any], whole: str) -> list[str]:
    """The constraints of ``part`` that are lost beside its keyword ``whole``."""
    lost = part.keys() & _CONSTRAINTS | part.keys() & frozenset(_WHOLE)
    lost = lost - {whole}
    if "type" in lost and _agrees_with_type(part, whole):
        lost = lost - {"type"}
    return sorted(lost)


def _agrees_with_type(part: dict[str, Any], whole: str) -> bool:
    """Whether everything that ``whole`` allows is of the type, or of the types, of the schema."""
    types = part["type"] if isinstance(part["type"], list) else [part["type"]]
    if whole in ("const", "enum"):
        values = part["enum"] if whole == "enum" and isinstance(part["enum"], list) else [part[whole]]
        return all(any(_is_of_type(value, name) for name in types) for value in values)
    if whole == "$ref" or not isinstance(part[whole], list):
        return False
    return all(isinstance(branch, dict) and branch.get("type") in types for branch in part[whole])


def _is_of_type(value: Any, name: Any) -> bool:
    if isinstance(value, bool):
        return bool(name == "boolean")
    names = {dict: "object", list: "array", str: "string", int: "integer", float: "number", type(None): "null"}
    return name == names[type(value)] or (name == "number" and isinstance(value, int))
