"""An API server of Kubernetes that does what a test says: lists, watches that can break, versions that are too old."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

READY = [{"type": "Ready", "status": "True"}]


def pod(name: str, address: str, *, ready: bool = True, port: int | None = None, **head: Any) -> dict[str, Any]:
    """A pod; keywords go into its metadata."""
    annotations = {} if port is None else {"annotations": {"sglang.ai/bootstrap-port": str(port)}}
    return {
        "metadata": {"name": name, "namespace": "n", "uid": f"uid-{name}", "labels": {}, **annotations, **head},
        "status": {"phase": "Running", "podIP": address, "conditions": READY if ready else []},
    }


class ClusterApi:
    """Serves pods of one selector and their changes.

    Attributes:
        token: what callers have to show.
        refused: statuses for the next calls, each used once.
        calls: (list or watch, query) of every call.
        watching: set while somebody watches.
    """

    def __init__(self, *, path: str = "/api/v1/pods", token: str = "secret") -> None:
        self.token = token
        self.refused: list[int] = []
        self.calls: list[tuple[str, dict[str, str]]] = []
        self.watching = asyncio.Event()
        self.page = 500
        self._objects: dict[str, dict[str, Any]] = {}
        self._version = 10
        self._oldest = 0
        self._events: list[tuple[int, bytes]] = []
        self._changed = asyncio.Event()
        self._broken = asyncio.Event()
        app = web.Application()
        app.router.add_get(path, self._serve)
        self.server = TestServer(app, host="localhost")

    def put(self, *objects: dict[str, Any]) -> None:
        """Add or change objects."""
        for value in objects:
            name = value["metadata"]["name"]
            self._tell("MODIFIED" if name in self._objects else "ADDED", value)
            self._objects[name] = value

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._tell("DELETED", self._objects.pop(name))

    def send(self, line: bytes) -> None:
        """A line of the watch as it is."""
        self._version += 1
        self._events.append((self._version, line))
        self._changed.set()

    def forget(self) -> None:
        """Versions until now are too old from now on, and watches break."""
        self._oldest = self._version
        self._events.clear()
        self.break_watches()

    def break_watches(self) -> None:
        """Cut the connections of all watches."""
        self._broken.set()
        self._changed.set()

    def count(self, kind: str) -> int:
        return sum(call[0] == kind for call in self.calls)

    def _tell(self, kind: str, value: dict[str, Any]) -> None:
        self._version += 1
        value["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, msgspec.json.encode({"type": kind, "object": value})))
        self._changed.set()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch") == "1"
        self.calls.append(("watch" if watch else "list", dict(request.query)))
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return web.json_response({"code": 401, "message": "who are you"}, status=401)
        if self.refused:
            return web.json_response({"message": "not now"}, status=self.refused.pop(0))
        return await (self._watch if watch else self._list)(request)

    async def _list(self, request: web.Request) -> web.Response:
        start = int(request.query.get("continue", 0))
        values = list(self._objects.values())
        head: dict[str, Any] = {"resourceVersion": str(self._version)}
        if start + self.page < len(values):
            head["continue"] = str(start + self.page)
        return web.json_response({"kind": "List", "metadata": head, "items": values[start : start + self.page]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        if seen < self._oldest:
            status = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
            await response.write(msgspec.json.encode(status) + b"\n")
            return response
        self._broken.clear()
        self.watching.set()
        try:
            while not self._broken.is_set():
                self._changed.clear()
                for version, line in list(self._events):
                    if version > seen:
                        half = len(line) // 2  # events come in any pieces
                        await response.write(line[:half])
                        await response.write(line[half:] + b"\n")
                        seen = version
                await self._changed.wait()
        finally:
            self.watching.clear()
        if request.transport is not None:
            request.transport.abort()
        return response
