"""What the two sides of a pair add to an exchange, and which sequences of an answer have begun.

A sequence that has begun at decode has its KV pages: what becomes of the prefill worker after that does not matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from sglang_lite.router.body import NOT_READ
from sglang_lite.router.call import Call
from sglang_lite.router.upstream import ByteStream

_INDEX = re.compile(rb'"index":\s?(\d{1,5})[,}\s]')
_OVERLAP = 16
"""Bytes of a part that are looked at again with the next one."""


class Arrivals:
    """The stream of decode as it comes. Nothing of it goes on before its first part: until then another pair may do."""

    def __init__(self) -> None:
        self._content: ByteStream | None = None
        self._first: bytes | None = None
        self._end = b""
        self._begun: set[int] = set()
        self.is_watched = True

    async def begin(self, content: ByteStream) -> ByteStream:
        """Wait for the first part of ``content``; this object is the whole stream then."""
        self._content = content
        self._first = await content.readany()
        return self

    async def readany(self) -> bytes:
        """See ``ByteStream``."""
        data, self._first = self._first, None
        if data is None:
            assert self._content is not None
            data = await self._content.readany()
        if self.is_watched:
            self._look(data)
        return data

    def has(self, count: int) -> bool:
        """Whether all of ``count`` sequences have begun; the beginning of the stream is that of a single one."""
        return count == 1 or len(self._begun) >= count

    def _look(self, data: bytes) -> None:
        text = self._end + data
        self._begun.update(int(number) for number in _INDEX.findall(text))
        self._end = text[-_OVERLAP:]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a pair in an exchange.

    Attributes:
        headers: for the worker and the client.
        arrivals: of decode; prefill has none, and its streams are read like any other reply.
    """

    headers: dict[str, str]
    arrivals: Arrivals | None = None


def sequences_of(call: Call) -> int:
    """Sequences of the answer to a call: prompts times choices. What is not understood counts once."""
    prompts = call.head.batch_size or 1
    try:
        body = msgspec.json.decode(call.body)
    except NOT_READ:
        return prompts
    sampling = body.get("sampling_params") if isinstance(body, dict) else None
    fields = sampling if isinstance(sampling, list) else [sampling] * prompts
    choices = [one.get("n", 1) if isinstance(one, dict) else body.get("n", 1) for one in fields]
    return sum(number if isinstance(number, int) and number > 0 else 1 for number in choices) or 1
