"""The gRPC server in this process, over an engine with its own core process, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.test_utils
import grpc

from sglang_lite.config import ServerConfig
from sglang_lite.engine.async_engine import AsyncEngine
from sglang_lite.rpc.generated.sglang.grpc.scheduler import sglang_scheduler_pb2_grpc
from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2_grpc
from sglang_lite.rpc.server import MESSAGE_BYTES, listening
from sglang_lite.server.app import make_app
from sglang_lite.server.context import ServerContext
from sglang_lite.server.run import warm_up
from tests.support.server import LocalServer, free_port

CLIENT_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
)


class GrpcClients:
    """A channel to the server, stubs of both services, and its HTTP application on a port of its own to compare with.

    Attributes:
        sidecar: URL of the HTTP sidecar.
    """

    def __init__(self, channel: Any, sidecar: str, http: LocalServer) -> None:
        self.channel = channel
        self.sidecar = sidecar
        self.http = http
        self.native: Any = sglang_pb2_grpc.SglangServiceStub(channel)  # type: ignore[no-untyped-call]
        self.scheduler: Any = sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)  # type: ignore[no-untyped-call]

    @property
    def context(self) -> ServerContext:
        return self.http.context


@asynccontextmanager
async def local_grpc(engine: Any, *, warm: bool = True) -> AsyncIterator[GrpcClients]:
    """Serve ``engine``, whose configuration has the ports, over gRPC and HTTP."""
    context = ServerContext(engine)
    async with listening(context):
        if warm:
            await warm_up(context)
        http = aiohttp.test_utils.TestServer(make_app(context))
        await http.start_server(shutdown_timeout=0.1)
        try:
            async with (
                aiohttp.ClientSession() as session,
                grpc.aio.insecure_channel(f"127.0.0.1:{context.port}", options=CLIENT_OPTIONS) as channel,
            ):
                sidecar = f"http://127.0.0.1:{engine.config.smg_http_sidecar_port}"
                yield GrpcClients(channel, sidecar, LocalServer(engine, context, http, session))
        finally:
            await http.close()


@asynccontextmanager
async def grpc_server(model: Path, **options: Any) -> AsyncIterator[GrpcClients]:
    """A warmed-up server over ``model``; ``options`` are those of ``ServerConfig``."""
    config = ServerConfig(
        model_path=str(model),
        port=0,
        smg_http_sidecar_port=free_port(),
        grpc_mode=True,
        **{"device": "cpu", "served_model_name": "chain", **options},
    )
    async with await AsyncEngine.start(config) as engine, local_grpc(engine) as clients:
        yield clients
