"""What the router reads of a worker's answer, whichever protocol the worker speaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class ByteStream(Protocol):
    """A body that is still on its way."""

    async def readany(self) -> bytes:
        """What has come, at least a byte; nothing at the end."""


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
