"""The gRPC server around the services, and the HTTP sidecar beside it."""

from __future__ import annotations

import asyncio
import functools
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
from aiohttp import web
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from sglang_lite.config import ServerConfig
from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.rpc.generated.sglang.grpc.scheduler import sglang_scheduler_pb2
from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2
from sglang_lite.rpc.inner import Inner
from sglang_lite.rpc.native_service import NativeService
from sglang_lite.rpc.open_services import MAX_REFLECTIONS, MAX_WATCHERS, HealthService, ReflectionService
from sglang_lite.rpc.scheduler_service import SchedulerService
from sglang_lite.rpc.sidecar import make_sidecar
from sglang_lite.rpc.status import Call, Handler, with_status
from sglang_lite.server.app import make_app
from sglang_lite.server.context import ServerContext
from sglang_lite.server.health_routes import is_serving
from sglang_lite.server.tls import Certificates
from sglang_lite.types import RequestError, StartupError

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 256 * 1024 * 1024
METADATA_BYTES = 64 * 1024
_PING_MS = 10_000
_HEALTH_SECONDS = 0.25
_SPARE_CALLS = 64
"""Calls beside generation that find room while as many requests run as may."""

_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    # As much as HTTP servers take in headers; 8 KiB, the default, are less than some keys and traces.
    ("grpc.max_metadata_size", METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES),
    # An occupied port must be an error, not a port shared with another server.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS),
    # A client that vanished without a word is noticed, and what it asked for is ended.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
_SERVICES = (
    sglang_pb2.DESCRIPTOR.services_by_name["SglangService"],
    sglang_scheduler_pb2.DESCRIPTOR.services_by_name["SglangScheduler"],
)


def method_handlers(descriptor: Any, servicer: object) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """The RPCs of a service that ``servicer`` has a method for; grpc answers UNIMPLEMENTED for the others."""
    from google.protobuf.message_factory import GetMessageClass

    handlers = {}
    for method in descriptor.methods:
        handler = getattr(servicer, method.name, None)
        if handler is None:
            continue
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            with_status(_decoding(handler, GetMessageClass(method.input_type))),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return handlers


def _decoding(handler: Handler, kind: Any) -> Handler:
    """``handler`` for the bytes of a message: those that are none are the caller's error, which grpc tells as one of
    the server."""

    @functools.wraps(handler)
    async def run(data: bytes, call: Call) -> Any:
        try:
            request = kind.FromString(data)
        except DecodeError as error:
            message = f"failed to decode Protobuf message: {kind.DESCRIPTOR.full_name}: {error}"
            raise RequestError(message, status=400) from None
        return await handler(request, call)

    return run


class GrpcServer:
    """The services of one context on one port. Its parts are started by ``start``."""

    def __init__(self, context: ServerContext, inner: Inner) -> None:
        self._context = context
        limit = context.config.max_concurrent_requests + _SPARE_CALLS + MAX_WATCHERS + MAX_REFLECTIONS
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=limit)
        servicers = (NativeService(context, inner), SchedulerService(context, inner))
        for descriptor, servicer in zip(_SERVICES, servicers, strict=True):
            handlers = method_handlers(descriptor, servicer)
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(descriptor.full_name, handlers),)
            )
        names = [descriptor.full_name for descriptor in _SERVICES]
        self._health = HealthService(("", *names))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflected = ReflectionService((*names, health.SERVICE_NAME, reflection.SERVICE_NAME))
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, self._server)

    async def start(self, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
        """Listen; returns the port.

        Raises:
            StartupError: the port cannot be had.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise StartupError(
                f"cannot bind {host}:{port} for gRPC: {error}; choose another --port or end the program that uses it"
            ) from error
        self.report_health()
        await self._server.start()
        return int(bound)

    def report_health(self) -> None:
        """Tell the health service what the server is now."""
        self._health.set(is_serving(self._context) and not self._context.paused)

    async def watch_health(self) -> None:
        """Keep the health service up to date until cancelled."""
        while True:
            self.report_health()
            await asyncio.sleep(_HEALTH_SECONDS)

    async def stop(self, grace: float) -> None:
        """Take no more calls; those that run may take ``grace`` seconds."""
        await self._server.stop(grace)


def _credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    certificates = Certificates.of(config)  # checks the files
    if certificates is None:
        return None
    if config.ssl_keyfile_password or config.enable_ssl_refresh:
        raise StartupError(
            "--grpc-mode serves TLS from a key without password and reads it once: "
            "leave out --ssl-keyfile-password and --enable-ssl-refresh"
        )
    return grpc.ssl_server_credentials(*certificates.contents())


@asynccontextmanager
async def listening(context: ServerContext) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Serve gRPC, and the sidecar; yields the function that takes no more calls while those that run live on.

    Raises:
        StartupError: a port cannot be had; then neither is open.
    """
    config = context.config
    async with AsyncExitStack() as stack:
        # Names of sockets are short: the engine's own directory may be too deep.
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-lite-grpc-"))
        path = f"{directory}/http"
        await _start(stack, web.AppRunner(make_app(context), **_RUNNER), lambda runner: web.UnixSite(runner, path))
        inner = await stack.enter_async_context(Inner(path))
        credentials = _credentials(config)
        sidecar = web.AppRunner(make_sidecar(inner), **_RUNNER)
        port = _sidecar_port(config)
        try:
            await _start(stack, sidecar, lambda runner: web.TCPSite(runner, config.host, port))
        except OSError as error:
            raise StartupError(
                f"cannot bind {config.host}:{port} for the HTTP sidecar: {error.strerror or error}; "
                f"choose another --smg-http-sidecar-port or end the program that uses it"
            ) from error
        server = GrpcServer(context, inner)
        stack.push_async_callback(server.stop, 0.2)
        context.port = await server.start(config.host, config.port, credentials)
        watching = asyncio.create_task(server.watch_health())
        stack.push_async_callback(_end, watching)
        logger.info("listening on grpc%s://%s:%d", "" if credentials is None else "s", config.host, context.port)
        logger.info("listening on http://%s:%d (sidecar)", *sidecar.addresses[0][:2])
        stopping: list[asyncio.Task[None]] = []

        async def stop() -> None:
            stopping.append(asyncio.create_task(server.stop(config.drain_timeout + 5.0)))

        yield stop


_RUNNER: dict[str, Any] = {
    "handler_cancellation": True,
    "access_log": None,
    "shutdown_timeout": 0.2,
    "max_line_size": LIMITS.header_bytes,
    "max_field_size": LIMITS.header_bytes,
}


async def _start(stack: AsyncExitStack, runner: web.AppRunner, site: Callable[[web.AppRunner], web.BaseSite]) -> None:
    stack.push_async_callback(runner.cleanup)
    await runner.setup()
    await site(runner).start()


def _sidecar_port(config: ServerConfig) -> int:
    if config.smg_http_sidecar_port is not None:
        return config.smg_http_sidecar_port
    return config.port + 1 if config.port else 0


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
