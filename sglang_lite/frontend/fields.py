"""Typed reading of one JSON value: the field's name and the value are in every message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from sglang_lite.types import RequestError

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_SHOWN = 80


def describe(value: object) -> str:
    """A JSON value as it appears in a type error."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int):
        return f"integer `{shorten(value)}`"
    if isinstance(value, float):
        return f"floating point `{value}`"
    if isinstance(value, str):
        return f'string "{shorten(value)}"'
    return "map" if isinstance(value, Mapping) else "sequence"


def shorten(value: object) -> str:
    """Text of a value for a message: cut when a client sent something huge, and always encodable as UTF-8."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 77 digits"
    text = value if isinstance(value, str) else str(value)
    shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return shown.encode("utf-8", "backslashreplace").decode()


def wrong_type(field: str, value: object, expected: str) -> NoReturn:
    raise RequestError(f"{field}: invalid type: {describe(value)}, expected {expected}", field=field)


def read_bool(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        wrong_type(field, value, "a boolean")
    return value


def read_int(field: str, value: object) -> int:
    """A 64-bit integer; neither a boolean nor a float counts as one."""
    if isinstance(value, bool) or not isinstance(value, int):
        wrong_type(field, value, "i64")
    if not _INT64_MIN <= value <= _INT64_MAX:
        raise RequestError(
            f"{field} must be a 64-bit integer in [{_INT64_MIN}, {_INT64_MAX}], got {shorten(value)}.", field=field
        )
    return value


def read_float(field: str, value: object) -> float:
    """A number, integers included; NaN and infinities pass and are for the range check to refuse."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        wrong_type(field, value, "f64")
    try:
        return float(value)
    except OverflowError:
        raise RequestError(f"{field} is too large a number: {shorten(value)}", field=field) from None


def read_str(field: str, value: object) -> str:
    if not isinstance(value, str):
        wrong_type(field, value, "a string")
    return value


def read_object(field: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        wrong_type(field, value, "a map")
    return value


def read_strings(field: str, value: object) -> tuple[str, ...]:
    """One string or a list of strings."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)):
        wrong_type(field, value, "a value or an array of values for StringOrList")
    return tuple(read_str(f"{field}[{index}]", item) for index, item in enumerate(value))


def read_ints(field: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        wrong_type(field, value, "a sequence of i64")
    return tuple(read_int(field, item) for item in value)
