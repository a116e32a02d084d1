"""``--workers N``: N router processes on one port, started again when they die.

They share the port (SO_REUSEPORT), the loads of workers and the set of workers; breakers, health checks and what is
known of prompts are each process's own. Prompts that a process does not know go by their beginning, so that all
processes send the same beginnings to the same workers.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from sglang_lite.router.options import RouterOptions
from sglang_lite.router.shared_loads import SharedLoads
from sglang_lite.router.siblings import Siblings
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

Serve = Callable[[RouterOptions, Siblings, int], int]
"""Serves as one of the processes; the number is a descriptor that ends with the parent."""

_CANNOT_START = 78
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PAUSE = 0.25


def run_processes(options: RouterOptions, serve: Serve) -> int:
    """Serve until told to stop. The caller has no threads and no event loop, as processes are forked.

    Raises:
        StartupError: the port cannot be had.
    """
    reserved = _reserve(options.host, options.port)
    directory = Path(tempfile.mkdtemp(prefix="sglang-lite-router-"))
    try:
        return _Family(replace(options, port=reserved.getsockname()[1]), directory, serve).run()
    finally:
        reserved.close()
        shutil.rmtree(directory, ignore_errors=True)


def _reserve(host: str, port: int) -> socket.socket:
    """A socket that keeps the port for the processes: bound, never listening."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        with socket.socket(family, kind, protocol) as probe:  # another server may share its port, but not with us
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        reserved = socket.socket(family, kind, protocol)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
    except OSError as error:
        raise StartupError(f"--port {port}: cannot listen on {host}: {error.strerror}") from error
    return reserved


class _Family:
    """The processes of one router."""

    def __init__(self, options: RouterOptions, directory: Path, serve: Serve) -> None:
        self._options = options
        self._directory = directory
        self._serve = serve
        self._loads = SharedLoads(options.workers)
        self._numbers: dict[int, int] = {}
        self._stopping = False
        self._failed = False
        # The parent never writes: when it is gone, however it ended, the children read the end.
        self._life, self._lifeline = os.pipe()

    def run(self) -> int:
        """Until all have ended; 0 when that was wanted."""
        for name in _SIGNALS:
            signal.signal(name, self._forward)
        for number in range(self._options.workers):
            self._start(number, is_new=False)
        while self._numbers:
            process, status = os.wait()
            number = self._numbers.pop(process)
            self._loads.clear(number)
            code = os.waitstatus_to_exitcode(status)
            if code == _CANNOT_START:
                self._failed = True
                self._stop()
            elif not self._stopping:
                logger.error("router process %d ended with %d; it is started again", number, code)
                self._start(number, is_new=True)
        return 1 if self._failed else 0

    def _start(self, number: int, *, is_new: bool) -> None:
        if is_new:
            time.sleep(_PAUSE)  # one that cannot live must not keep the machine busy
        # A signal between the fork and the child's own handlers would be passed on by the child too.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        process = os.fork()
        if process == 0:
            self._live(number, is_new=is_new)
        self._numbers[process] = number
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if self._stopping:
            self._stop()

    def _live(self, number: int, *, is_new: bool) -> None:
        """The life of a child; does not return."""
        code = 1
        try:
            for name in _SIGNALS:
                signal.signal(name, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            os.close(self._lifeline)
            random.seed()  # ids of requests would be the same in all
            siblings = Siblings(self._directory, number, self._loads, is_new=is_new)
            code = self._serve(self._options, siblings, self._life)
        except StartupError as error:
            logger.error("%s", error)
            code = _CANNOT_START
        except Exception:  # the parent hears of it by the code
            logger.exception("router process %d failed", number)
        finally:
            logging.shutdown()
            os._exit(code)

    def _stop(self) -> None:
        self._stopping = True
        self._tell(signal.SIGTERM)

    def _forward(self, number: int, frame: object) -> None:
        if number != signal.SIGHUP:
            self._stopping = True
        self._tell(number)

    def _tell(self, number: int) -> None:
        for process in list(self._numbers):
            with suppress(ProcessLookupError):  # a signal came between its end and the note of it
                os.kill(process, number)
