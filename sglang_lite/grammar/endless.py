"""Schemas that only an endless text would satisfy: an object that must hold one of its own kind, and so on."""

from __future__ import annotations

from typing import Any

from sglang_lite.grammar.base import GrammarError

_MAX_PARTS = 20_000
"""Parts of a schema that are looked at; more are left to the limits of time and size."""


def check_ends(schema: Any) -> None:
    """Check that some finite text satisfies a schema, as far as its references go.

    A part is finite when all parts that it needs are: the least fixed point over the references.

    Raises:
        GrammarError: there is none; the message has the JSON pointer of the part.
    """
    if "$ref" not in str(schema)[:1_000_000]:
        return
    finite: set[int] = set()
    parts = _all_parts(schema)
    while True:
        found = {id(part) for part in parts if id(part) not in finite and _is_finite(part, schema, finite)}
        if not found:
            break
        finite |= found
    if isinstance(schema, dict) and id(schema) not in finite and len(parts) < _MAX_PARTS:
        raise GrammarError(
            f"JSON Schema at {_culprit(schema, finite)} needs another of its own kind in every text, so that no text "
            f"matches it; leave the property out of 'required', or allow something else beside the reference"
        )


def _is_finite(part: dict[str, Any], root: Any, finite: set[int]) -> bool:
    return all(_holds(needed, root, finite) for needed in _needed(part)) and all(
        any(_holds(choice, root, finite) for choice in choices) for choices in _choices(part)
    )


def _needed(part: dict[str, Any]) -> list[Any]:
    """The schemas that every text of ``part`` satisfies somewhere."""
    needed: list[Any] = []
    if isinstance(part.get("$ref"), str):
        needed.append(_Reference(part["$ref"]))
    if isinstance(part.get("allOf"), list):
        needed += part["allOf"]
    if "enum" in part or "const" in part:
        return needed
    properties = part.get("properties")
    if part.get("type", "object") == "object" and isinstance(properties, dict):
        required = part.get("required")
        needed += [properties[name] for name in required if name in properties] if isinstance(required, list) else []
    if part.get("type", "array") == "array" and isinstance(part.get("minItems"), int) and part["minItems"] > 0:
        first = part.get("prefixItems")
        items = list(first[: part["minItems"]]) if isinstance(first, list) else []
        if len(items) < part["minItems"] and isinstance(part.get("items"), dict):
            items.append(part["items"])
        needed += items
    return needed


def _choices(part: dict[str, Any]) -> list[list[Any]]:
    return [part[key] for key in ("anyOf", "oneOf") if isinstance(part.get(key), list) and part[key]]


class _Reference(str):
    """The target of a ``$ref``."""


def _holds(part: Any, root: Any, finite: set[int]) -> bool:
    if isinstance(part, _Reference):
        part = resolve_reference(part, root)
    return id(part) in finite if isinstance(part, dict) else True


def resolve_reference(reference: str, root: Any) -> Any:
    """What a reference within the document points to; None when nothing is there, or when it leads elsewhere."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    node = root
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


def _all_parts(schema: Any) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    pending = [schema]
    while pending and len(parts) < _MAX_PARTS:
        node = pending.pop()
        if isinstance(node, dict):
            parts.append(node)
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    return parts


def _culprit(schema: dict[str, Any], finite: set[int]) -> str:
    """The pointer of the first part that is needed and not finite."""
    part, pointer, seen = schema, "#", set[int]()
    while id(part) not in seen:
        seen.add(id(part))
        reference = part.get("$ref")
        if isinstance(reference, str):
            target = resolve_reference(reference, schema)
            if isinstance(target, dict) and id(target) not in finite:
                part, pointer = target, reference
                continue
        properties = part.get("properties")
        for name, inner in properties.items() if isinstance(properties, dict) else ():
            if name in (part.get("required") or ()) and isinstance(inner, dict) and id(inner) not in finite:
                part, pointer = inner, f"{pointer}/properties/{name}"
                break
    return pointer
