"""Health and reflection: services without a key, whose streams last as long as a client likes.

Each may have so many streams at a time, so that strangers cannot take the places of calls with a key, and neither waits
for a client that does not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sglang_lite.rpc.status import Call

MAX_WATCHERS = 256
"""Of health: each channel of a client that checks health by itself holds one."""
MAX_REFLECTIONS = 16
_WRITE_SECONDS = 10.0
_REFLECTION_SECONDS = 300.0


class _Places:
    """Streams that are open."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self._taken = 0

    async def check(self, call: Call) -> None:
        """Refuse a call when all places are taken."""
        if self._taken >= self._most:
            message = f"there are {self._most} {self._what} already"
            await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """One place, until left."""
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """``grpc.health.v1.Health`` for services that are all well, or none.

    Args:
        names: of the services.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._serving = False
        self._changed = asyncio.Event()
        self._places = _Places("watchers of health", MAX_WATCHERS)

    def set(self, serving: bool) -> None:
        """Tell whoever watches."""
        if serving is not self._serving:
            self._serving = serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: Any, call: Call) -> Any:
        """What a service is now."""
        if request.service not in self._names:
            await call.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:100]!r} here")
        return self._status(request.service)

    async def Watch(self, request: Any, call: Call) -> None:
        """What it is, and again whenever that changes."""
        await self._places.check(call)
        with self._places.taken():
            last = None
            while True:
                changed, status = self._changed, self._status(request.service)
                if status.status != last:
                    last = status.status
                    await _written(call, status)
                await changed.wait()

    def _status(self, name: str) -> Any:
        kinds = health_pb2.HealthCheckResponse
        if name not in self._names:
            return kinds(status=kinds.SERVICE_UNKNOWN)
        return kinds(status=kinds.SERVING if self._serving else kinds.NOT_SERVING)


async def _written(call: Call, message: Any) -> None:
    try:
        async with asyncio.timeout(_WRITE_SECONDS):
            await call.write(message)
    except TimeoutError:
        await call.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the client has stopped reading")


class ReflectionService(reflection.aio.ReflectionServicer):  # type: ignore[misc]
    """Server reflection; a stream is open for five minutes at most."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self._places = _Places("streams of reflection", MAX_REFLECTIONS)

    async def ServerReflectionInfo(self, request_iterator: Any, call: Call) -> AsyncIterator[Any]:
        """Answers to questions about the services."""
        await self._places.check(call)
        with self._places.taken():
            try:
                async with asyncio.timeout(_REFLECTION_SECONDS):
                    async for reply in super().ServerReflectionInfo(request_iterator, call):
                        yield reply
            except TimeoutError:
                await call.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the stream was open for too long")
