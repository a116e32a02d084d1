"""Whether at most one branch of a ``oneOf`` can match: a grammar takes the text of any of them.

What follows is a proof or none. Two branches are told apart by their types, their constants, the bounds of numbers and
lengths, or, for objects and arrays, by a part that one of them needs and that cannot be right for both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_lite.grammar.base import GrammarError
from sglang_lite.grammar.endless import resolve_reference

_MAX_DEPTH = 12
_MAX_BRANCHES = 256
"""Branches that are compared with each other; more have to differ in the value of one property."""

_KINDS = {
    "array": {"array"},
    "boolean": {"boolean"},
    "integer": {"integer"},
    "null": {"null"},
    "number": {"integer", "fraction"},
    "object": {"object"},
    "string": {"string"},
}
_ALL_KINDS = frozenset[str]().union(*_KINDS.values())


def check_one_of(part: dict[str, Any], where: str, root: Any, library: str) -> None:
    """Refuse branches that may both match.

    Args:
        part: a schema; where: JSON pointer to it; root: what its references point into.

    Raises:
        GrammarError: with the pointers of two branches.
    """
    branches = part.get("oneOf")
    if not isinstance(branches, list) or len(branches) < 2 or _has_discriminator(branches, root):
        return
    if len(branches) > _MAX_BRANCHES:
        raise GrammarError(
            f"JSON Schema at {where}/oneOf has {len(branches)} branches, of which {library} enforces that one matches, "
            f"and not that no other does; use anyOf, or a required property with another const in each"
        )
    for second, other in enumerate(branches):
        for first in range(second):
            if not are_disjoint(branches[first], other, root):
                raise GrammarError(
                    f"JSON Schema at {where}/oneOf is not supported by {library}: the branches {first} and {second} "
                    f"may both match, which it would not prevent; use anyOf, or tell them apart by their types or by "
                    f"a required property with another const in each"
                )


def _has_discriminator(branches: list[Any], root: Any) -> bool:
    """Whether every branch is an object that needs one and the same property, each with other values."""
    resolved = [_resolved(branch, root) for branch in branches]
    if not all(isinstance(one, dict) and one.get("type") == "object" for one in resolved):
        return False
    required = [one.get("required") for one in resolved]
    if not all(isinstance(names, list) for names in required):
        return False
    for name in required[0]:
        seen: list[set[tuple[str, Any]]] = []
        for one, names in zip(resolved, required, strict=True):
            properties = one.get("properties")
            described = properties.get(name) if isinstance(properties, dict) and name in names else None
            values = _values(_resolved(described, root))
            if values is None or any(isinstance(value, dict | list) for value in values):
                break
            seen.append({_key(value) for value in values})
        if len(seen) == len(resolved) and len(set().union(*seen)) == sum(map(len, seen)):
            return True
    return False


def are_disjoint(first: Any, second: Any, root: Any, depth: int = 0) -> bool:
    """Whether it is certain that no value satisfies both schemas."""
    if depth > _MAX_DEPTH:
        return False
    first, second = _resolved(first, root), _resolved(second, root)
    if first is False or second is False:
        return True
    if not isinstance(first, dict) or not isinstance(second, dict):
        return False
    for one, other in ((first, second), (second, first)):
        for word in ("anyOf", "oneOf"):
            if isinstance(one.get(word), list):
                return all(are_disjoint(branch, other, root, depth + 1) for branch in one[word])
        if isinstance(one.get("allOf"), list) and one["allOf"]:
            return any(are_disjoint(each, other, root, depth + 1) for each in one["allOf"])
    for one, other in ((first, second), (second, first)):
        values = _values(one)
        if values is not None:
            return all(_refuses(other, value) for value in values)
    common = _kinds(first) & _kinds(second)
    return all(_differ_as(kind, first, second, root, depth) for kind in common)


def _resolved(schema: Any, root: Any) -> Any:
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = resolve_reference(schema["$ref"], root)
    return {}


def _values(schema: Any) -> list[Any] | None:
    """The only values of a schema, None when it does not list them."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _key(value: Any) -> tuple[str, Any]:
    """What makes two values of JSON equal: 1 and 1.0 are, 1 and true are not."""
    return ("boolean" if isinstance(value, bool) else "number" if isinstance(value, int | float) else "", value)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "fraction"
    return {str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]


def _kinds(schema: dict[str, Any]) -> set[str]:
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    found = [_KINDS.get(str(name), _ALL_KINDS) for name in names]
    return set[str]().union(*found)


def _refuses(schema: dict[str, Any], value: Any) -> bool:
    """Whether a schema certainly refuses a value."""
    values = _values(schema)
    if values is not None:
        return all(_key(value) != _key(other) for other in values)
    kind = _kind(value)
    if kind not in _kinds(schema):
        return True
    if kind in ("integer", "fraction"):
        return not _overlap((value, value), _number_bounds(schema))
    if kind in ("string", "array"):
        low, high = _sizes(schema, "Length" if kind == "string" else "Items")
        return not low <= len(value) <= high
    if kind == "object":
        return any(name not in value for name in _required(schema))
    return False


def _differ_as(kind: str, first: dict[str, Any], second: dict[str, Any], root: Any, depth: int) -> bool:
    if kind in ("integer", "fraction"):
        return not _overlap(_number_bounds(first), _number_bounds(second))
    if kind == "string":
        return not _overlap(_sizes(first, "Length"), _sizes(second, "Length"))
    if kind == "array":
        return _differ_as_arrays(first, second, root, depth)
    return kind == "object" and _differ_as_objects(first, second, root, depth)


def _differ_as_objects(first: dict[str, Any], second: dict[str, Any], root: Any, depth: int) -> bool:
    for one, other in ((first, second), (second, first)):
        mine, theirs = one.get("properties") or {}, other.get("properties") or {}
        is_closed = other.get("additionalProperties") is False and not other.get("patternProperties")
        for name in _required(one):
            if name not in theirs:
                if is_closed:
                    return True
            elif are_disjoint(mine.get(name, True), theirs[name], root, depth + 1):
                return True
    return False


def _differ_as_arrays(first: dict[str, Any], second: dict[str, Any], root: Any, depth: int) -> bool:
    sizes = _sizes(first, "Items"), _sizes(second, "Items")
    if not _overlap(*sizes):
        return True
    if max(sizes[0][0], sizes[1][0]) < 1:
        return False
    heads = []
    for one in (first, second):
        prefix = one.get("prefixItems")
        heads.append(prefix[0] if isinstance(prefix, list) and prefix else one.get("items", True))
    return are_disjoint(heads[0], heads[1], root, depth + 1)


def _required(schema: dict[str, Any]) -> Iterable[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _sizes(schema: dict[str, Any], what: str) -> tuple[float, float]:
    low, high = schema.get(f"min{what}"), schema.get(f"max{what}")
    return (low if isinstance(low, int) else 0, high if isinstance(high, int) else float("inf"))


def _number_bounds(schema: dict[str, Any]) -> tuple[float, float]:
    """The smallest and the largest number; exclusive bounds are taken for inclusive ones, which proves less."""
    lows = [schema[key] for key in ("minimum", "exclusiveMinimum") if _is_number(schema.get(key))]
    highs = [schema[key] for key in ("maximum", "exclusiveMaximum") if _is_number(schema.get(key))]
    return max(lows, default=float("-inf")), min(highs, default=float("inf"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _overlap(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return first[0] <= second[1] and second[0] <= first[1]
