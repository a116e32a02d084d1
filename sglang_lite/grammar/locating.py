"""Where in a schema a library finds fault that does not say so itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sglang_lite.grammar.endless import resolve_reference
from sglang_lite.grammar.json_schema import escaped, inner_schemas

_MOST_TRIES = 400
_DEFINITIONS = ("$defs", "definitions")


def pointer_to_fault(schema: Any, fault_of: Callable[[Any], str]) -> str:
    """JSON pointer to the innermost part of a schema that has the fault of the whole.

    Args:
        fault_of: what the library says of a schema, empty when it takes it.
    """
    fault = _sort_of(fault_of(schema))
    shared = {name: schema[name] for name in _DEFINITIONS if isinstance(schema, dict) and name in schema}
    part, pointer, tries, seen = schema, "#", 0, set[str]()
    while True:
        for inner, place in _next_parts(part, pointer, schema):
            if place in seen or not isinstance(inner, dict):
                continue
            seen.add(place)
            tries += 1
            if tries > _MOST_TRIES:
                return pointer
            if _sort_of(fault_of({**shared, **inner})) == fault:
                part, pointer = inner, place
                break
        else:
            return pointer


def pointer_to_nul(text: str) -> str:
    """JSON pointer to the first string of a JSON text that has a NUL character, or to the whole if there is none."""
    try:
        pending: list[tuple[Any, str]] = [(msgspec.json.decode(text), "#")]
    except (msgspec.DecodeError, RecursionError):
        return "#"
    while pending:
        part, pointer = pending.pop()
        if isinstance(part, str) and "\0" in part:
            return pointer
        if isinstance(part, dict):
            if any("\0" in name for name in part):
                return pointer
            pending += [(inner, f"{pointer}/{escaped(name)}") for name, inner in reversed(part.items())]
        elif isinstance(part, list):
            pending += [(inner, f"{pointer}/{index}") for index, inner in reversed(list(enumerate(part)))]
    return "#"


def _next_parts(part: Any, pointer: str, root: Any) -> list[tuple[Any, str]]:
    if not isinstance(part, dict):
        return []
    parts = list(inner_schemas(part, pointer))
    if isinstance(part.get("$ref"), str):
        parts.insert(0, (resolve_reference(part["$ref"], root), part["$ref"]))
    # Definitions last: one that nothing refers to is no fault.
    return sorted(parts, key=lambda found: found[1].split("/")[-2:-1] in ([name] for name in _DEFINITIONS))


def _sort_of(fault: str) -> str:
    """A fault without what the same one is called further out."""
    return fault.partition(":")[0] if fault.startswith("Unsatisfiable") else fault
