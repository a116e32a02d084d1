"""``response_format`` of the OpenAI endpoints as a constraint of the native ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_lite.frontend.fields import read_object, shorten
from sglang_lite.types import RequestError

ANY_OBJECT = '{"type": "object"}'
"""Schema of ``json_object``."""


def response_constraint(body: Mapping[str, Any]) -> dict[str, str]:
    """The sampling parameter that a body's ``response_format`` asks for: one entry, or none for plain text.

    Raises:
        RequestError: it is malformed.
    """
    value = body.get("response_format")
    if value is None:
        return {}
    given = read_object("response_format", value)
    match given.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"json_schema": ANY_OBJECT}
        case "json_schema":
            wrapper = given.get("json_schema")
            schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
            if schema is None:
                raise RequestError(
                    "schema_ is required for json_schema response format request.", field="response_format"
                )
            return {"json_schema": msgspec.json.encode(schema).decode()}
        case "structural_tag":
            return {"structural_tag": msgspec.json.encode(given).decode()}
    raise RequestError(
        f"response_format {shorten(given)} has no type that is served; allowed: text, json_object, json_schema, "
        "structural_tag",
        field="response_format",
    )
