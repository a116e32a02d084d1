"""Names of requests: made here, or given by the caller and checked."""

from __future__ import annotations

import itertools

from sglang_lite.frontend.fields import wrong_type
from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.types import RequestError

MAX_REQUEST_ID_LENGTH = LIMITS.request_id


class RequestIds:
    """Ids that are unique in this server: prefix, time in ns and running number, the last two in hex.

    The number is zero padded, so that no id is the beginning of another one (aborts match by prefix).

    Args:
        front: number of the front process that makes them; each counts in a range of its own.
    """

    def __init__(self, front: int = 0) -> None:
        self._numbers = itertools.count((front << 32) + 1)

    def make(self, now_ns: int, prefix: str = "") -> str:
        """A new id, such as ``cmpl-18f3a9c1d2e4b600-00000001`` for the prefix ``cmpl-``."""
        return f"{prefix}{now_ns:x}-{next(self._numbers):08x}"


def with_prefix(prefix: str, request_id: str) -> str:
    """The id with the prefix, which is not doubled when the caller's id has it already."""
    return request_id if request_id.startswith(prefix) else prefix + request_id


def parse_request_id(value: object, field: str = "rid") -> str:
    """Check an id given by the caller: 1 to 256 printable characters.

    Raises:
        RequestError: otherwise.
    """
    if not isinstance(value, str):
        wrong_type(field, value, "a string")
    if not value or len(value) > MAX_REQUEST_ID_LENGTH:
        raise RequestError(f"{field} must have 1 to {MAX_REQUEST_ID_LENGTH} characters, got {len(value)}.", field=field)
    if not value.isprintable():
        raise RequestError(f"{field} must consist of printable characters, got {value!r}.", field=field)
    return value
