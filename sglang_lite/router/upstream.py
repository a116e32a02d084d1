"""What the router reads of a worker's answer, whichever protocol the worker speaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class ByteStream(Protocol):
    """A body that is still on its way."""

    async def readany(self) -> bytes:
        """What has come, at least a byte; nothing at the end."""


class Begun:
    """A body whose first part was read already."""

    def __init__(self, first: bytes, rest: ByteStream) -> None:
        self._first: bytes | None = first
        self._rest = rest

    async def readany(self) -> bytes:
        """The first part, then the others."""
        if self._first is None:
            return await self._rest.readany()
        first, self._first = self._first, None
        return first


class Upstream(Protocol):
    """An answer whose head is here; ``aiohttp.ClientResponse`` is one."""

    @property
    def status(self) -> int:
        """HTTP status."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers; names in any case."""

    @property
    def content_type(self) -> str:
        """Type of the body, without parameters."""

    @property
    def content(self) -> ByteStream:
        """The body as it comes."""

    async def read(self) -> bytes:
        """The whole body."""


def check_status(status: int) -> None:
    """Raises ConnectionError for a status that is no answer of a server of models: none at all, or a redirection."""
    if not 200 <= status < 600 or 300 <= status < 400:
        raise ConnectionError(f"status {status}")
