"""What a grammar library would not enforce of a JSON schema, found before it is compiled, and structural tags.

Such a keyword is refused and never ignored: an answer that matches the grammar has to match the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from sglang_lite.grammar.base import GrammarError
from sglang_lite.grammar.endless import check_ends
from sglang_lite.grammar.limits import HOW_TO_SHRINK, MAX_SCHEMA_PROPERTIES, TOO_LARGE
from sglang_lite.grammar.one_of import check_one_of
from sglang_lite.grammar.unenforced import UNENFORCED, check_combination, check_reference

ANY_JSON = "$$ANY$$"
"""In place of a schema: any JSON value."""

MAX_DEPTH = 64
"""Nesting of a schema; the libraries read it by recursion."""

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_FORMATS = frozenset(
    [
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "json-pointer",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    ]
)
_ONE_SCHEMA = ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_SCHEMA_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_SCHEMA_MAPS = ("$defs", "definitions", "patternProperties", "properties")


def check_schema(text: str, library: str) -> Any:
    """The schema of a JSON text, checked.

    Args:
        library: what to call the library in messages.

    Raises:
        GrammarError: it is no schema, or a part of it would be ignored; the message has a JSON pointer to the part.
    """
    schema = decode_schema(text)
    check_parts(schema, "#", library)
    check_ends(schema)
    return schema


def check_parts(schema: Any, pointer: str, library: str) -> None:
    """Check a decoded schema; see ``check_schema``."""
    for part, where in checked_parts(schema, pointer):
        _check_keywords(part, where, library)
        check_reference(part, where, schema)
        check_combination(part, where, library)
        check_one_of(part, where, schema, library)


def checked_parts(schema: Any, pointer: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The parts of a schema that are objects, each with its JSON pointer.

    Raises:
        GrammarError: one is no schema, they are too many or too deep, or a type is none.
    """
    if schema is False:
        raise GrammarError(f"JSON Schema at {pointer} is false, so that no text matches it")
    pending = [(schema, pointer, 0)]
    num_properties = 0
    while pending:
        part, where, depth = pending.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise GrammarError(f"JSON Schema at {where} must be an object or a boolean, got {type(part).__name__}")
        if depth > MAX_DEPTH:
            raise GrammarError(f"JSON Schema at {where} is nested more than {MAX_DEPTH} deep")
        properties = part.get("properties")
        num_properties += len(properties) if isinstance(properties, dict) else 0
        if num_properties > MAX_SCHEMA_PROPERTIES:
            raise GrammarError(
                f"{TOO_LARGE}: JSON Schema at {pointer} has more than {MAX_SCHEMA_PROPERTIES} properties in all, at "
                f"{where}; {HOW_TO_SHRINK}"
            )
        _check_types(part, where)
        yield part, where
        pending += [(inner, place, depth + 1) for inner, place in inner_schemas(part, where)]


def _check_types(part: dict[str, Any], where: str) -> None:
    if "type" not in part:
        return
    named = part["type"]
    types = named if isinstance(named, list) else [named]
    if not types:
        raise GrammarError(f"JSON Schema at {where}/type is an empty list, so that no text matches it; name a type")
    for name in types:
        if name not in _TYPES:
            raise GrammarError(
                f"JSON Schema at {where}/type must be one of {', '.join(sorted(_TYPES))}, or a list of them, got "
                f"{str(name)[:80]!r}"
            )


def _check_keywords(part: dict[str, Any], where: str, library: str) -> None:
    ignored = sorted(UNENFORCED & part.keys())
    if ignored:
        raise GrammarError(
            f"JSON Schema at {where} is not supported by {library}: keyword(s) {', '.join(ignored)} would be ignored"
        )
    if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
        raise GrammarError(f"JSON Schema at {where}/allOf is not supported by {library}: only one schema is enforced")
    name = part.get("format")
    if name is not None and name not in _FORMATS:
        raise GrammarError(
            f"JSON Schema at {where}/format is not supported by {library}: {str(name)[:80]!r} is none of "
            f"{', '.join(sorted(_FORMATS))}"
        )
    limits: list[str] = [key for key in ("format", "pattern") if key in part]
    if part.keys() & {"minLength", "maxLength"}:
        limits.append("minLength/maxLength")
    if len(limits) > 1:
        raise GrammarError(
            f"JSON Schema at {where} is not supported by {library}: {' and '.join(limits)} cannot be combined"
        )


def inner_schemas(part: dict[str, Any], where: str) -> Iterator[tuple[Any, str]]:
    """The schemas directly within one, and their JSON pointers. Examples, defaults and constants are data."""
    for key in _ONE_SCHEMA:
        if key in part and not (key == "items" and isinstance(part[key], list)):
            yield part[key], f"{where}/{key}"
    for key in _SCHEMA_LISTS:
        if isinstance(part.get(key), list):
            for index, inner in enumerate(part[key]):
                yield inner, f"{where}/{key}/{index}"
    for key in _SCHEMA_MAPS:
        if isinstance(part.get(key), dict):
            for name, inner in part[key].items():
                yield inner, f"{where}/{key}/{escaped(name)}"


def read_structural_tag(text: str, library: str) -> dict[str, Any]:
    """A structural tag in its newer form, with every schema in it checked.

    The older form is a list of ``structures`` (begin, schema, end) with ``triggers``.

    Raises:
        GrammarError: it is malformed, or a part of it would be ignored.
    """
    tag: Any = decode_schema(text)
    if not isinstance(tag, dict):
        raise GrammarError(f"a structural tag must be an object, got {type(tag).__name__}")
    if "structures" in tag:
        tag = _newer_form(tag)
    pending: list[tuple[Any, str, int]] = [(tag.get("format"), "#/format", 0)]
    while pending:
        node, where, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise GrammarError(f"the structural tag at {where} is nested more than {MAX_DEPTH} deep")
        if isinstance(node, list):
            pending += [(inner, f"{where}/{index}", depth + 1) for index, inner in enumerate(node)]
        elif isinstance(node, dict):
            for key, inner in node.items():
                if key == "json_schema":
                    check_parts(inner, f"{where}/{key}", library)
                else:
                    pending.append((inner, f"{where}/{escaped(key)}", depth + 1))
    checked: dict[str, Any] = tag
    return checked


def _newer_form(tag: dict[str, Any]) -> dict[str, Any]:
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not all(isinstance(item, dict) for item in structures):
        raise GrammarError("#/structures of a structural tag must be a list of objects")
    if not isinstance(triggers, list) or not all(isinstance(item, str) for item in triggers):
        raise GrammarError("#/triggers of a structural tag must be a list of strings")
    tags = []
    for index, item in enumerate(structures):
        begin, end = item.get("begin"), item.get("end")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise GrammarError(f"#/structures/{index} of a structural tag must have the strings begin and end")
        schema = item.get("schema")
        content = {"type": "json_schema", "json_schema": {} if schema is None else schema}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    whole = {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": tags,
        "at_least_one": bool(tag.get("at_least_one", False)),
    }
    return {"type": "structural_tag", "format": whole}


def decode_schema(text: str) -> Any:
    """A JSON text.

    Raises:
        GrammarError: it is none.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"it is not valid JSON: {error}") from error


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer, cut where it is long."""
    return name.replace("~", "~0").replace("/", "~1")[:80]
