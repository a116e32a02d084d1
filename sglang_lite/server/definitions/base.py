"""Reading a request body into its type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from sglang_lite.types import RequestError

_Body = TypeVar("_Body", bound=msgspec.Struct)
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`")


class RequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all request bodies. Fields that a type does not name are not read by it."""


def parse_body(body: Mapping[str, Any], kind: type[_Body]) -> _Body:
    """Check the types of a body's fields.

    Raises:
        RequestError: a required field is missing or a field has another type; the message names it by its path.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None


def _named(message: str) -> RequestError:
    """The error in the words of this server: the path of the field first."""
    found = _PATH.search(message)
    path = found["path"] if found else ""
    text = message[: found.start()] if found else message
    missing = _MISSING.match(text)
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
        return RequestError(f"{path} is required", field=path)
    return RequestError(f"{path}: {text}" if path else text, field=path or None)
