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
from sglang_lite.router.processes import run_processes
from sglang_lite.router.siblings import Siblings
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
    if options.workers > 1:
        return run_processes(options, _serve_one)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(options))


def _serve_one(options: RouterOptions, siblings: Siblings, parent: int) -> int:
    """One process of several."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(options, siblings, parent))


async def _serve(options: RouterOptions, siblings: Siblings | None = None, parent: int | None = None) -> int:
    drain, at_once = asyncio.Event(), asyncio.Event()

    def notify() -> None:
        (at_once if drain.is_set() else drain).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, notify)
    if parent is not None:
        loop.add_reader(parent, _orphaned, loop, parent, drain)
    context = RouterContext(options, siblings=siblings)
    certificates = server_certificates(options)
    closing: asyncio.Task[None] | None = None
    raise_file_limit()
    runner = EnvelopeRunner(make_app(context), handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        encryption = None if certificates is None else certificates.context
        site = web.TCPSite(
            runner,
            options.host,
            options.port,
            backlog=_BACKLOG,
            ssl_context=encryption,
            reuse_port=siblings is not None or None,
        )
        try:
            if siblings is not None:
                siblings.path.unlink(missing_ok=True)
                await web.UnixSite(runner, siblings.path).start()
            await site.start()
        except OSError as error:
            raise StartupError(f"--port {options.port}: cannot listen on {options.host}: {error.strerror}") from error
        if certificates is not None:
            certificates.reload_on_hangup()
        assert runner.server is not None
        closing = asyncio.create_task(close_silent_clients(runner.server))
        logger.info("%s: %s:%s", READY_LINE, options.host, runner.addresses[-1][1])
        await drain.wait()
        context.draining = True
        await site.stop()
        await wait_idle(context, at_once, options.shutdown_grace_period_secs)
    finally:
        if closing is not None:
            closing.cancel()
        await runner.cleanup()
        if siblings is not None:
            await siblings.close()
    return 0


def _orphaned(loop: asyncio.AbstractEventLoop, parent: int, drain: asyncio.Event) -> None:
    """The parent is gone without a word: nobody would start or end its processes any more."""
    loop.remove_reader(parent)
    drain.set()


async def wait_idle(context: RouterContext, at_once: asyncio.Event, seconds: float) -> None:
    """Wait until all calls have their answers, also those that no worker has at the moment, and control calls;
    ``at_once`` and the time end this."""
    deadline = context.now + seconds
    while context.serving and not at_once.is_set() and context.now < deadline:
        try:
            await asyncio.wait_for(at_once.wait(), 0.02)
        except TimeoutError:
            continue
