"""The life of a server process: start the engine, bind, warm up, serve, drain, leave."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import uvloop
from aiohttp import web

from sglang_lite.config import ServerConfig
from sglang_lite.engine.async_engine import AsyncEngine
from sglang_lite.engine.launcher import CORE_COMMAND
from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.observability.progress import ProgressLine
from sglang_lite.server.app import make_app
from sglang_lite.server.context import Phase, ServerContext
from sglang_lite.server.draining import wait_for_requests, wait_idle
from sglang_lite.server.front_workers import FrontMessage, FrontWorkers
from sglang_lite.server.health_routes import probe
from sglang_lite.server.heartbeat import watch_heartbeat
from sglang_lite.server.peers import Peers
from sglang_lite.server.preflight import check_text_side
from sglang_lite.server.protocol_errors import JsonErrorRunner
from sglang_lite.server.router_registration import RouterRegistrations, check_fleet_options
from sglang_lite.server.silent_clients import close_silent_clients, raise_file_limit
from sglang_lite.server.tls import Certificates, SecurePort
from sglang_lite.server.transfer_sites import TransferSites, transfer_sites
from sglang_lite.types import RequestError, StartupError

logger = logging.getLogger(__name__)

READY_LINE = "The server is fired up and ready to roll!"

_BACKLOG = 4096
_WATCH_SECONDS = 0.25
_ABORT_SECONDS = 1.0
"""How long the engine gets to take the abort at a shutdown, and then clients to receive the end of their requests."""
_SECRET_FLAGS = ("--api-key", "--admin-api-key", "--router-api-key", "--ssl-keyfile-password", "--tenants")
EXIT_ENGINE_DIED = 3

StopListening = Callable[[], Awaitable[None]]


def run_server(config: ServerConfig, command: Sequence[str] = CORE_COMMAND) -> int:
    """Serve ``config`` until a signal or the death of the engine.

    Args:
        config: prepared by ``startup.prepare``.
        command: how the engine core is started; benchmarks start one without a model.

    Returns:
        The exit code: 0 after a signal, not 0 when the engine died.

    Raises:
        StartupError: a default is wrong, or the engine or the port cannot be had; nothing is left running.
    """
    check_text_side(config)
    check_fleet_options(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, command))


class ShutdownSignals:
    """SIGTERM and SIGINT: the first asks for a drain, the second for an immediate end."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.immediate = asyncio.Event()

    def install(self) -> None:
        """Take over both signals in the running event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.notify)

    def notify(self) -> None:
        """A signal came."""
        (self.immediate if self.drain.is_set() else self.drain).set()


class StartProgress:
    """Shows the messages of a starting engine, one progress line for each."""

    def __init__(self) -> None:
        self._message: str | None = None
        self._stack = ExitStack()
        self._line: ProgressLine | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def __call__(self, message: str, fraction: float) -> None:
        """``message`` is being worked on; ``fraction`` is negative when nobody knows how far."""
        if message != self._message or self._line is None:
            self._stack.close()
            self._message = message
            self._line = self._stack.enter_context(ProgressLine(message))
        self._line.update(max(0, round(fraction * 1000)), 1000)


async def _serve(config: ServerConfig, command: Sequence[str]) -> int:
    started_at = time.monotonic()
    signals = ShutdownSignals()
    signals.install()
    if config.is_disaggregated:
        raise_file_limit()  # of the engine core too, which inherits it: its peers connect to it
    # Before the engine, which registers there, and until it has ended.
    async with transfer_sites(config) as sites:
        return await _serve_engine(sites, command, signals, started_at)


async def _serve_engine(
    sites: TransferSites, command: Sequence[str], signals: ShutdownSignals, started_at: float
) -> int:
    config = sites.config
    with StartProgress() as progress:
        starting = asyncio.create_task(AsyncEngine.start(config, progress=progress, command=command))
        if not await _first(starting, signals.drain):
            return 0
    engine = starting.result()
    workers = FrontWorkers()
    try:
        context = ServerContext(engine, launch_command=launch_command(sys.argv))
        context.engine_infos = sites.engine_infos
        if config.tokenizer_worker_num > 1:
            context.peers = Peers(engine.directories[0], 0, config.tokenizer_worker_num)
        async with _interface(config)(context) as stop_listening:
            warming = asyncio.create_task(warm_up(context))
            if not await _first(warming, signals.drain):
                return 0
            if not await _start_fronts(workers, front_messages(context, engine), engine, signals):
                return 0 if engine.failure is None else EXIT_ENGINE_DIED
            context.startup_seconds["ready"] = time.monotonic() - started_at
            logger.info("%s (%.1f s)", READY_LINE, context.startup_seconds["ready"])
            heartbeat = asyncio.create_task(watch_heartbeat(context))
            registrations = RouterRegistrations(config, context.port)
            registrations.start()
            died = await _until_end(engine, workers, signals)
            heartbeat.cancel()
            # Before the port is closed: what routers send after this finds other servers.
            await _first(asyncio.create_task(registrations.leave()), signals.immediate)
            if died:
                reason = f"front process {workers.dead} of the server ended by itself"
                if engine.failure is not None:
                    reason = f"the engine died: {engine.failure}"
                else:
                    engine.lose_core(reason)
                logger.error("%s", reason)
                workers.lose_server(reason)
            else:
                workers.drain()
                await stop_listening()
                await drain(context, signals.immediate, config.drain_timeout)
                await _first(asyncio.create_task(workers.wait()), signals.immediate)
            context.phase = Phase.DRAINING
            await wait_idle(context, _ABORT_SECONDS)
            if context.tracer is not None:
                await asyncio.to_thread(context.tracer.close)
            return EXIT_ENGINE_DIED if died else 0
    finally:
        await workers.close()
        await engine.close()


def front_messages(context: ServerContext, engine: AsyncEngine) -> list[FrontMessage]:
    """What the other front processes of the server have to know, one each; none without ``context.peers``."""
    config = context.config
    if context.peers is None:
        return []
    return [
        FrontMessage(
            config=config.to_json(),
            info=engine.info,
            directories=engine.directories,
            front=front,
            port=context.port,
            launch_command=context.launch_command,
        )
        for front in range(1, config.tokenizer_worker_num)
    ]


async def _start_fronts(
    workers: FrontWorkers, messages: Sequence[FrontMessage], engine: AsyncEngine, signals: ShutdownSignals
) -> bool:
    """Start the other fronts; False when a signal or the death of the engine came first.

    Raises:
        StartupError: one of them does not start.
    """
    ended = asyncio.Event()
    watching = [asyncio.create_task(wait) for wait in (_set_when_gone(engine, ended), _set_with(signals.drain, ended))]
    try:
        started = await _first(asyncio.create_task(workers.start(messages)), ended)
    finally:
        for task in watching:
            task.cancel()
    if engine.failure is not None:
        logger.error("the engine died while the other front processes started: %s", engine.failure)
        return False
    return started


async def _set_when_gone(engine: AsyncEngine, ended: asyncio.Event) -> None:
    while engine.is_alive:
        await asyncio.sleep(_WATCH_SECONDS)
    ended.set()


async def _set_with(signalled: asyncio.Event, ended: asyncio.Event) -> None:
    await signalled.wait()
    ended.set()


async def _first(task: asyncio.Task[Any], stop: asyncio.Event) -> bool:
    """Wait for ``task``; False when ``stop`` came first and the task was cancelled. Its exception is raised."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False
    finally:
        stopping.cancel()


def _interface(config: ServerConfig) -> Callable[[ServerContext], AbstractAsyncContextManager[StopListening]]:
    """What serves: ``listening`` of this module, or of the gRPC server."""
    if not config.grpc_mode:
        return listening
    # Imported where it is used: its libraries are an extra.
    from sglang_lite.rpc import server

    return server.listening


@asynccontextmanager
async def listening(context: ServerContext) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Serve HTTP; yields the function that closes the port while connections live on.

    Raises:
        StartupError: the port cannot be bound.
    """
    config = context.config
    # Without access log: a line for every request costs more than many of them take.
    runner = JsonErrorRunner(
        make_app(context),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=0.2,
        # aiohttp's own is an hour: whoever opens connections and uses each once would hold all file descriptors.
        keepalive_timeout=LIMITS.idle_seconds,
        max_line_size=LIMITS.header_bytes,
        max_field_size=LIMITS.header_bytes,
    )
    certificates = Certificates.of(config)
    watching: asyncio.Task[None] | None = None
    raise_file_limit()
    await runner.setup()
    assert runner.server is not None
    closing = asyncio.create_task(close_silent_clients(runner.server))
    try:
        shared = True if context.peers is not None else None
        try:
            stop = await _bind(runner, config, certificates, reuse_port=shared)
        except OSError as error:
            raise StartupError(
                f"cannot bind {config.host}:{config.port}: {error.strerror or error}; "
                f"choose another --port or end the program that uses it"
            ) from error
        if certificates is not None:
            certificates.reload_on_hangup()
            # A hangup signal reaches the first front only.
            if config.enable_ssl_refresh or context.peers is not None:
                watching = asyncio.create_task(certificates.watch())
        context.port = runner.addresses[0][1]
        for address in runner.addresses:
            logger.info("listening on %s://%s:%d", "http" if certificates is None else "https", *address[:2])
        if context.peers is not None:
            await web.UnixSite(runner, context.peers.own_path).start()
        yield stop
    finally:
        closing.cancel()
        if context.peers is not None:
            await context.peers.close()
        if watching is not None:
            watching.cancel()
        await runner.cleanup()


async def _bind(
    runner: web.AppRunner, config: ServerConfig, certificates: Certificates | None, *, reuse_port: bool | None
) -> StopListening:
    if certificates is None:
        site = web.TCPSite(runner, config.host, config.port, backlog=_BACKLOG, reuse_port=reuse_port)
        await site.start()
        return site.stop
    port = SecurePort(runner, certificates, backlog=_BACKLOG)
    await port.start(config.host, config.port, reuse_port=reuse_port)
    return port.stop


async def warm_up(context: ServerContext) -> None:
    """Generate once, so that the first client does not pay for lazy work, then report ready.

    Raises:
        StartupError: the engine cannot generate.
    """
    if not context.config.skip_server_warmup:
        with ProgressLine("first generation") as progress:
            progress.update(0, 1)
            if not await probe(context):
                reason = context.engine.failure or "the request failed or took too long"
                raise StartupError(f"the warm-up generation failed: {reason}")
            progress.update(1, 1)
    # What exists now stays: later collections need not look at it.
    gc.collect()
    gc.freeze()
    context.phase = Phase.READY


async def _until_end(engine: AsyncEngine, workers: FrontWorkers, signals: ShutdownSignals) -> bool:
    """Wait for a signal (False) or the death of the engine or of another front (True)."""
    while engine.is_alive and workers.dead is None:
        workers.lose_replicas(engine.lost_replicas)
        try:
            async with asyncio.timeout(_WATCH_SECONDS):
                await signals.drain.wait()
            return False
        except TimeoutError:
            continue
    return True


async def drain(context: ServerContext, immediate: asyncio.Event, timeout: float) -> None:
    """Let running requests finish, for at most ``timeout`` seconds or until ``immediate``; abort the others."""
    context.phase = Phase.DRAINING
    logger.info("shutting down: %d requests in flight, at most %g s", context.requests_in_flight, timeout)
    idle = asyncio.create_task(wait_for_requests(context, timeout))
    await _first(idle, immediate)
    if context.requests_in_flight and context.engine.is_alive:
        logger.warning("aborting %d requests that are still running", context.requests_in_flight)
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await context.engine.abort_all()
        except (TimeoutError, RequestError) as error:
            logger.warning("the engine did not take the abort in time: %s", str(error) or "it is in a long step")


def launch_command(arguments: list[str]) -> str:
    """A command line with the values of secret options removed."""
    shown: list[str] = []
    hide_next = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        # Options may be abbreviated: --admin is --admin-api-key.
        is_secret = len(name) > 2 and any(flag.startswith(name) for flag in _SECRET_FLAGS)
        if hide_next:
            shown.append("******")
        elif is_secret and equals:
            shown.append(f"{name}=******")
        else:
            shown.append(word)
        hide_next = not hide_next and is_secret and not equals
    return " ".join(shown)
