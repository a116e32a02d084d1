"""Workers that speak gRPC (``sglang.runtime.v1.SglangService``), seen by the router as if they spoke HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from multidict import CIMultiDict

from sglang_lite.router.grpc_answers import Answer, Replies, failure_answer
from sglang_lite.router.grpc_calls import Planned, plan
from sglang_lite.router.upstream import Upstream
from sglang_lite.router.workers import Worker
from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2 as pb
from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2_grpc
from sglang_lite.rpc.routed import ROUTE

_MESSAGE_BYTES = 256 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    # A worker that vanished without a word is noticed. Workers accept a ping every ten seconds.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # The router has retries of its own, and a worker that is back should be found soon.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_DROPPED = frozenset({"content-type", "content-length", "user-agent", "accept", "host", "connection", "te", ROUTE})
"""A client that could set ``ROUTE`` would call the control plane of workers by a route of the model."""
_STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
_TOLD = frozenset({"x-sgl-resumable"})
"""Initial metadata that are headers of a stream."""
_EXTRA_SECONDS = 5.0
"""The worker's deadline lies behind that of the router, which says what happened in its own words."""
_NAME_SIGNS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_.")


@dataclass(eq=False, slots=True)
class _Link:
    """A channel, the calls that use it, and whether it is to be closed behind the last of them."""

    channel: Any
    stub: Any
    users: int = 0
    retired: bool = False
    offers_routes: bool = False


@dataclass(eq=False, slots=True)
class GrpcWorkers:
    """Channels to workers, one each. Owned by the router's application; ``close`` ends all of them.

    Args:
        seconds: longest life of a call.
        authorities: PEM certificates that ``grpcs`` workers are checked against; None for those of the system.
        identity: private key and certificate chain shown to ``grpcs`` workers, as PEM.
    """

    seconds: float
    authorities: bytes | None = None
    identity: tuple[bytes, bytes] | None = None
    _links: dict[Worker, _Link] = field(default_factory=dict)
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    def forget(self, worker: Worker) -> None:
        """Close the channel of ``worker`` once its calls have ended."""
        link = self._links.pop(worker, None)
        if link is not None:
            link.retired = True
            self._close_unused(link)

    async def close(self) -> None:
        """Close all channels; calls that run are cancelled."""
        for link in self._links.values():
            await link.channel.close()
        self._links.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def request(
        self, worker: Worker, method: str, path: str, data: bytes | None, headers: Mapping[str, str] | None
    ) -> AbstractAsyncContextManager[Upstream]:
        """A call of ``path`` as an HTTP worker would answer it; leaving it early cancels the call.

        Raises:
            ConnectionError: the worker cannot be reached, or breaks its answer off.
        """
        return self._request(worker, method, path, data, headers or {})

    @asynccontextmanager
    async def _request(
        self, worker: Worker, method: str, path: str, data: bytes | None, headers: Mapping[str, str]
    ) -> AsyncIterator[Upstream]:
        link = self._links.get(worker) or self._open(worker)
        planned = plan(method, path, data, link.offers_routes)
        if isinstance(planned, Answer):
            yield planned
            return
        link.users += 1
        calls: list[Any] = []

        def start(rpc: str, request: Any) -> Any:
            metadata = (*metadata_of(headers), *planned.metadata)
            calls.append(getattr(link.stub, rpc)(request, metadata=metadata, timeout=self.seconds + _EXTRA_SECONDS))
            return calls[-1]

        try:
            yield await self._answer(link, start, planned)
        finally:
            for call in calls:
                call.cancel()
            link.users -= 1
            self._close_unused(link)

    async def _answer(self, link: _Link, start: Callable[[str, Any], Any], planned: Planned) -> Upstream:
        """The head of the worker's answer, with the whole body where it is no stream."""
        call = start(planned.rpc, planned.request)
        try:
            if not planned.is_stream_rpc:
                messages = [await call]
                if planned.rpc == "GetServerInfo":
                    link.offers_routes = any(name == "x-sgl-routes" for name, _ in await call.initial_metadata())
                    if not messages[0].attributes.get("served_model_name"):
                        messages.append(await start("GetModelInfo", pb.GetModelInfoRequest()))
                return planned.whole(messages)
            if not planned.streamed:
                return planned.whole([message async for message in call])
            replies = Replies(call, planned.frames())
            await replies.start()
            told = await call.initial_metadata()
        except grpc.aio.AioRpcError as error:
            return failure_answer(planned.path, error)
        headers = CIMultiDict(_STREAM_HEADERS)
        headers.update({name: value for name, value in told if name in _TOLD})
        return Answer(200, headers, b"", replies)

    def _open(self, worker: Worker) -> _Link:
        target = worker.url.partition("://")[2]
        if worker.url.startswith("grpcs://"):
            key, chain = self.identity or (None, None)
            credentials = grpc.ssl_channel_credentials(self.authorities, key, chain)
            channel = grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        else:
            channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        stub = sglang_pb2_grpc.SglangServiceStub(channel)  # type: ignore[no-untyped-call]
        link = self._links[worker] = _Link(channel, stub)
        return link

    def _close_unused(self, link: _Link) -> None:
        if link.retired and not link.users:
            task = asyncio.create_task(link.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def metadata_of(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Headers as metadata; what gRPC has no room for is left out."""
    kept = []
    for name, value in headers.items():
        lowered = name.lower()
        wrong = lowered in _DROPPED or lowered.startswith(("grpc-", ":")) or lowered.endswith("-bin")
        if not wrong and set(lowered) <= _NAME_SIGNS and value.isascii() and value.isprintable():
            kept.append((lowered, value))
    return kept
