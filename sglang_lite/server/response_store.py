"""Responses that can be looked up, continued and cancelled later: in memory, bounded."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from sglang_lite.server.errors import encode_json
from sglang_lite.types import RequestError

MAX_RESPONSES = 1024
MAX_BYTES = 256 << 20
"""Size of all that is kept, as JSON. The oldest responses that have ended go first."""


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response.

    Attributes:
        response: as it stands.
        messages: the conversation up to its end, for a request that continues it.
        task: what computes it, None for one that was answered directly.
    """

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    task: asyncio.Task[None] | None = None
    size: int = 0

    @property
    def is_running(self) -> bool:
        """Whether it is still being computed."""
        return self.task is not None and not self.task.done()


def already_stored(response_id: str) -> RequestError:
    """Why an id cannot be taken."""
    return RequestError(f"a response with id {response_id[:100]!r} is stored already", field="rid")


class ResponseStore:
    """Responses by id."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._responses

    def get(self, response_id: str, field: str | None = None) -> StoredResponse:
        """A response.

        Raises:
            RequestError: 404, there is none with this id.
        """
        found = self._responses.get(response_id)
        if found is None:
            raise RequestError(f"Response with id {response_id[:100]!r} not found.", status=404, field=field)
        return found

    def check_new(self, response_id: str) -> None:
        """Refuse an id that is taken.

        Raises:
            RequestError: 400.
        """
        if response_id in self._responses:
            raise already_stored(response_id)

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, or what became of it; the oldest ones go where there is no room."""
        name = stored.response["id"]
        self._remove(name)
        stored.size = len(encode_json(stored.response)) + len(encode_json(stored.messages))
        self._responses[name] = stored
        self._bytes += stored.size
        for old in list(self._responses.values()):
            if len(self._responses) <= self._max_responses and self._bytes <= self._max_bytes:
                return
            if old is not stored and not old.is_running:
                self._remove(old.response["id"])

    def delete(self, response_id: str) -> None:
        """Forget a response; one that is being computed is ended.

        Raises:
            RequestError: 404, there is none with this id.
        """
        task = self.get(response_id).task
        if task is not None:
            task.cancel()
        self._remove(response_id)

    async def close(self, _: web.Application) -> None:
        """End what is still being computed."""
        tasks = [one.task for one in self._responses.values() if one.task is not None and one.is_running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _remove(self, name: str) -> None:
        removed = self._responses.pop(name, None)
        if removed is not None:
            self._bytes -= removed.size
