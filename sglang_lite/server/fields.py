"""Optional fields of a request body: null counts as absent; a wrong type is a 400 that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_lite.frontend.fields import read_bool, read_int, read_object, read_str
from sglang_lite.types import RequestError


def boolean(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A boolean field."""
    value = body.get(name)
    return default if value is None else read_bool(name, value)


def integer(
    body: Mapping[str, Any], name: str, *, minimum: int | None = None, maximum: int | None = None
) -> int | None:
    """An integer field, or None when absent."""
    value = body.get(name)
    if value is None:
        return None
    number = read_int(name, value)
    if minimum is not None and number < minimum:
        raise RequestError(f"{name} must be at least {minimum}, got {number}.", field=name)
    if maximum is not None and number > maximum:
        raise RequestError(f"{name} must be at most {maximum}, got {number}.", field=name)
    return number


def text(body: Mapping[str, Any], name: str) -> str | None:
    """A string field, or None when absent."""
    value = body.get(name)
    return None if value is None else read_str(name, value)


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object field, empty when absent."""
    value = body.get(name)
    return {} if value is None else read_object(name, value)


def is_integer_list(value: Any) -> bool:
    """Whether ``value`` is a list of integers, none of them a boolean. An empty list is one."""
    return isinstance(value, list) and set(map(type, value)) <= {int}
