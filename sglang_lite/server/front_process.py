"""A further front process: ``python -m sglang_lite.server.front_process``, which ``front_workers`` starts."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys

import msgspec
import uvloop

from sglang_lite.config import ServerConfig
from sglang_lite.engine.async_engine import AsyncEngine
from sglang_lite.observability.logs import configure_logging
from sglang_lite.server.context import Phase, ServerContext
from sglang_lite.server.front_workers import DRAIN, LOST, LOST_REPLICA, READY, FrontMessage
from sglang_lite.server.heartbeat import watch_heartbeat
from sglang_lite.server.peers import Peers
from sglang_lite.server.run import drain, listening

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 16 * 1024 * 1024
"""Longest line of the first front: a configuration may carry a chat template."""


def main() -> int:
    """Serve until the first front says otherwise. Returns the exit code of the process."""
    # A terminal or a service manager signals the whole group. The first front decides and tells the others.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    configure_logging()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve())


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=MESSAGE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _serve() -> int:
    orders = await _standard_input()
    message = msgspec.json.decode(await orders.readline(), type=FrontMessage)
    config = ServerConfig.from_json(message.config).resolved(port=message.port)
    configure_logging(config.log_level)
    engine = await AsyncEngine.attach(config, message.info, message.directories, message.front)
    try:
        context = ServerContext(engine, launch_command=message.launch_command)
        context.peers = Peers(message.directories[0], message.front, config.tokenizer_worker_num)
        gc.collect()
        gc.freeze()
        context.phase = Phase.READY
        async with listening(context) as stop_listening:
            sys.stdout.buffer.write(READY)
            sys.stdout.buffer.flush()
            heartbeat = asyncio.create_task(watch_heartbeat(context))
            while (order := await orders.readline()).startswith(LOST_REPLICA):
                replica, _, reason = order.removeprefix(LOST_REPLICA).decode().strip().partition(" ")
                engine.lose_replica(int(replica), reason)
            heartbeat.cancel()
            await stop_listening()
            if order.startswith(LOST):
                engine.lose_core(order.removeprefix(LOST).decode().strip())
            if order:
                await drain(context, _end_of(orders), config.drain_timeout if order == DRAIN else 1.0)
            return 0
    finally:
        await engine.close()


def _end_of(orders: asyncio.StreamReader) -> asyncio.Event:
    """Set when the first front wants an immediate end: it closes the pipe."""
    ended = asyncio.Event()

    async def watch() -> None:
        await orders.read()
        ended.set()

    _WATCHING.add(asyncio.create_task(watch()))
    return ended


_WATCHING: set[asyncio.Task[None]] = set()
"""The event loop keeps no reference to a task."""


if __name__ == "__main__":
    sys.exit(main())
