"""The life of a router process: listen, serve, drain, leave."""

from __future__ import annotations

import asyncio
import logging
import signal

import uvloop
from aiohttp import web

from sglang_lite.router.app import make_app
from sglang_lite.router.context import RouterContext
from sglang_lite.router.envelope import EnvelopeRunner
from sglang_lite.router.options import RouterOptions
from sglang_lite.router.tls import server_certificates
from sglang_lite.server.silent_clients import close_silent_clients, raise_file_limit
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

READY_LINE = "The router is ready"
_BACKLOG = 4096


def run_router(options: RouterOptions) -> int:
    """Serve until SIGTERM or SIGINT, then let running requests end; a second signal ends at once.

    Raises:
        StartupError: the port cannot be had.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(options))


async def _serve(options: RouterOptions) -> int:
    drain, at_once = asyncio.Event(), asyncio.Event()

    def notify() -> None:
        (at_once if drain.is_set() else drain).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, notify)
    context = RouterContext(options)
    certificates = server_certificates(options)
    closing: asyncio.Task[None] | None = None
    raise_file_limit()
    runner = EnvelopeRunner(make_app(context), handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        encryption = None if certificates is None else certificates.context
        site = web.TCPSite(runner, options.host, options.port, backlog=_BACKLOG, ssl_context=encryption)
        try:
            await site.start()
        except OSError as error:
            raise StartupError(f"--port {options.port}: cannot listen on {options.host}: {error.strerror}") from error
        if certificates is not None:
            certificates.reload_on_hangup()
        assert runner.server is not None
        closing = asyncio.create_task(close_silent_clients(runner.server))
        logger.info("%s: %s:%s", READY_LINE, options.host, runner.addresses[0][1])
        await drain.wait()
        context.draining = True
        await site.stop()
        await wait_idle(context, at_once, options.shutdown_grace_period_secs)
    finally:
        if closing is not None:
            closing.cancel()
        await runner.cleanup()
    return 0


async def wait_idle(context: RouterContext, at_once: asyncio.Event, seconds: float) -> None:
    """Wait until no worker has a request of ours, ``at_once`` is set or the time is over."""
    deadline = context.now + seconds
    while context.leases.total and not at_once.is_set() and context.now < deadline:
        try:
            await asyncio.wait_for(at_once.wait(), 0.02)
        except TimeoutError:
            continue
