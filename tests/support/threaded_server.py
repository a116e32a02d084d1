"""Whole servers without processes: the life of ``serve`` in the event loop of the test, its core in a thread."""

from __future__ import annotations

import asyncio
import gc
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import zmq

from sglang_lite.config import ServerConfig
from sglang_lite.engine import client, process
from sglang_lite.engine.build import build_core_parts
from sglang_lite.engine.launch import LaunchMessage
from sglang_lite.engine.launcher import CORE_COMMAND, egress_of, ingress_of
from sglang_lite.engine.transport import ZmqTransport
from sglang_lite.server import run
from sglang_lite.server.transfer_sites import transfer_sites


class CoreThread:
    """Stands in for ``launcher.CoreProcess``: the same core over the same sockets."""

    def __init__(self, config: str, command: Sequence[str] = CORE_COMMAND, *, fronts: int = 1) -> None:
        self.directory = tempfile.mkdtemp(prefix="sglang-lite-")
        self.ingress = ingress_of(self.directory)
        self.egress = tuple(egress_of(self.directory, front) for front in range(fronts))
        self.process_id = None
        self._launch = LaunchMessage(config=config, directory=self.directory, ingress=self.ingress, egress=self.egress)
        self._ended = asyncio.Event()
        self._thread: threading.Thread | None = None

    async def start(self, on_exit: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()

        def end(code: int) -> None:
            self._ended.set()
            on_exit(code)

        def serve() -> None:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            transport = ZmqTransport(context, self.ingress, self.egress)
            code = process.EXIT_FAULT
            try:
                code = process._serve(self._launch, transport, build_core_parts)
            finally:
                transport.close(linger=process.FAREWELL_SECONDS)
                context.term()
                loop.call_soon_threadsafe(end, code)

        self._thread = threading.Thread(target=serve, name="core", daemon=True)
        self._thread.start()

    async def close(self, grace: float) -> None:
        if self._thread is not None:
            async with asyncio.timeout(60):  # a thread cannot be killed
                await self._ended.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def use_threads(patch: pytest.MonkeyPatch) -> None:
    """From now on cores are threads."""
    patch.setattr(client, "CoreProcess", CoreThread)
    # It ends the process of a core that has stopped turning, as one that has ended looks to it.
    patch.setattr(process, "watchdog", SimpleNamespace(watch=lambda *arguments: None))
    for module in (process, run):  # the objects of a test must not stay
        patch.setattr(module, "gc", SimpleNamespace(collect=gc.collect, freeze=lambda: None))


class ThreadedServer:
    """One server, after ``use_threads``; its port is that of ``config``. Nothing but signals is left out."""

    def __init__(self, config: ServerConfig) -> None:
        self.url = f"http://{config.host}:{config.port}"
        self._signals = run.ShutdownSignals()
        self._life = asyncio.create_task(self._live(config))

    async def _live(self, config: ServerConfig) -> int:
        async with transfer_sites(config) as sites:
            return await run._serve_engine(sites, CORE_COMMAND, self._signals, time.monotonic())

    @property
    def is_running(self) -> bool:
        return not self._life.done()

    def terminate(self) -> None:
        """What SIGTERM does."""
        self._signals.notify()

    async def wait(self) -> int:
        """Its exit code."""
        return await self._life
