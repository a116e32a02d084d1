"""Stream events whose shape never changes: the bytes around the one text in them are made once a sequence."""

from __future__ import annotations

from typing import Any

from sglang_lite.server.errors import encode_json

_SLOT = "\u0000slot\u0000"
"""Stands for the text while the bytes around it are made. Its JSON spelling occurs in no id, model or key."""


class FixedFrame:
    """An event that differs from the next one in a single string.

    Args:
        shape: the event with ``SLOT`` in place of the string.

    Raises:
        ValueError: the slot is not in the shape exactly once.
    """

    SLOT = _SLOT

    __slots__ = ("_head", "_tail")

    def __init__(self, shape: Any) -> None:
        parts = encode_json(shape).split(encode_json(_SLOT))
        if len(parts) != 2:
            raise ValueError(f"the shape has the slot {len(parts) - 1} times, expected once")
        self._head, self._tail = parts

    def encode(self, text: str) -> bytes:
        """The event as JSON, the same bytes as encoding the whole object with ``text`` in it."""
        return b"%b%b%b" % (self._head, encode_json(text), self._tail)
