"""Text to value: one converter per kind of option value, used for command line, environment and YAML alike.

Every converter takes the text and raises ValueError with the reason; whoever calls it adds the name of the option.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

Converter = Callable[[str], Any]

_DECIMAL_FACTOR: dict[str, int] = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_FACTOR: dict[str, int] = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_HUMAN_INTEGER = re.compile(r"(?P<number>[+-]?\d+(?:\.\d+)?)(?P<suffix>[kMGT]|[KMGT]i)?")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def text(value: str) -> str:
    """Any text."""
    return value


def integer(value: str) -> int:
    """A plain integer."""
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"invalid int value: {value!r}") from None


def number(value: str) -> float:
    """A finite decimal number."""
    try:
        result = float(value)
    except ValueError:
        raise ValueError(f"invalid float value: {value!r}") from None
    if result != result or result in (float("inf"), float("-inf")):
        raise ValueError(f"invalid float value: {value!r} (must be finite)")
    return result


def human_integer(value: str) -> int:
    """An integer that may end in k M G T (powers of 1000, decimals allowed) or Ki Mi Gi Ti (powers of 1024)."""
    match: re.Match[str] | None = _HUMAN_INTEGER.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"invalid int value: {value!r} (an integer, or one with a suffix k M G T Ki Mi Gi Ti)")
    digits: str = match["number"]
    suffix: str = match["suffix"] or ""
    if suffix in _BINARY_FACTOR:
        if "." in digits:
            raise ValueError(
                f"Decimals are not allowed with IEC suffixes like 'Ki'. Write {value!r} as an integer or with k M G T"
            )
        return int(digits) * _BINARY_FACTOR[suffix]
    if "." not in digits:
        return int(digits) * _DECIMAL_FACTOR.get(suffix, 1)
    whole, fraction = digits.split(".")
    scale = int("1" + "0" * len(fraction))
    scaled = int(whole + fraction) * _DECIMAL_FACTOR.get(suffix, 1)
    if scaled % scale:
        raise ValueError(f"invalid int value: {value!r} (not a whole number)")
    return scaled // scale


def port(value: str) -> int:
    """A TCP port, 0 to 65535."""
    result = integer(value)
    if not 0 <= result <= 65535:
        raise ValueError(f"invalid port: {value!r} (must be 0 to 65535)")
    return result


def port_range(value: str) -> str:
    """``N`` or ``A-B`` with A <= B, ports 1 to 65535; kept as text."""
    first, separator, last = value.partition("-")
    try:
        low = int(first)
        high = int(last) if separator else low
    except ValueError:
        raise ValueError(f"invalid port range: {value!r} (write N or A-B)") from None
    if not 1 <= low <= high <= 65535:
        raise ValueError(f"invalid port range: {value!r} (need 1 <= first <= last <= 65535)")
    return value


def ports_of(value: str) -> range:
    """The ports of a text that ``port_range`` accepted."""
    first, separator, last = value.partition("-")
    return range(int(first), (int(last) if separator else int(first)) + 1)


def boolean(value: str) -> bool:
    """true/false, yes/no, on/off, 1/0 in any case."""
    lowered = value.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(f"invalid bool value: {value!r} (use true or false)")


def json_value(value: str) -> Any:
    """Any JSON text."""
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"invalid loads value: {value!r} ({error})") from None


def json_object(value: str) -> dict[str, Any]:
    """A JSON object."""
    result = json_value(value)
    if not isinstance(result, dict):
        raise ValueError(f"invalid loads value: {value!r} (must be a JSON object)")
    return result


def words(value: str) -> list[str]:
    """Several words: a JSON list of texts (or objects, which stay JSON), or words with blanks between them."""
    if not value.lstrip().startswith("["):
        return value.split()
    items = json_value(value)
    return [item if isinstance(item, str) else json.dumps(item) for item in items]


def lower_text(value: str) -> str:
    """Text whose case does not matter."""
    return value.strip().lower()


def device_name(value: str) -> str:
    """A device; an index suffix such as ``cuda:0`` is dropped (``--base-gpu-id`` chooses the ordinal)."""
    return re.sub(r":\d+$", "", value.strip().lower())


TEXTS: tuple[Converter, ...] = (text, lower_text, device_name, port_range)
"""Converters whose result is text."""
