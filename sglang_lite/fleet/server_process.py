"""One server process on the machine of its owner: a process of the fleet itself, or a Ray actor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_lite.fleet.spec import Role

SERVE_COMMAND = (sys.executable, "-m", "sglang_lite", "serve")
ROUTER_COMMAND = (sys.executable, "-m", "sglang_lite", "router")
_KILL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a replica.

    Attributes:
        name: of its log file, and in messages.
        flags: of ``serve``, without those that depend on the machine.
        environment: variables in addition to the owner's.
        grace_seconds: how long the process may take to end by itself once its owner is gone.
        log_directory: for a log of its own; empty lets it write to its owner's.
    """

    name: str
    role: Role = "plain"
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    grace_seconds: float = 45.0
    log_directory: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica serves, and what it is there.

    Attributes:
        url: without a slash at the end.
        bootstrap_port: of a prefill replica.
        process_id: of its keeper, on its own machine.
    """

    url: str
    bootstrap_port: int | None
    process_id: int


class ManagedProcess:
    """A command under a keeper, whose standard input is the handle to it. Only ``end`` waits.

    When this object's process ends, however it ends, the command is told to end.
    """

    def __init__(self, command: Sequence[str], launch: Launch) -> None:
        words = [sys.executable, "-m", "sglang_lite.fleet.keeper", str(launch.grace_seconds), "--", *command]
        environment = {**os.environ, **launch.environment}
        with contextlib.ExitStack() as stack:
            output = None
            if launch.log_directory:
                directory = Path(launch.log_directory)
                directory.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context((directory / f"{launch.name}.log").open("ab"))
            # A session of its own: what is typed at a terminal reaches the fleet only, which ends things in order.
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    @property
    def process_id(self) -> int:
        """Of the keeper."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def drain(self) -> None:
        """Ask the command to end."""
        self._tell(b"drain\n")

    def kill(self) -> None:
        """End it at once."""
        self._tell(b"kill\n")

    async def end(self) -> None:
        """Kill it and wait until it is gone. A keeper that hangs is killed itself; the kernel tells the command."""
        for kill in (self.kill, self._process.kill):
            kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILL_SECONDS):
                    while self.exit_code() is None:
                        await asyncio.sleep(0.01)
                    return

    def _tell(self, word: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._process.stdin.write(word)
            self._process.stdin.flush()


class ServerProcess:
    """Owns one process of ``sglang-lite serve`` and everything that it starts. Nothing here waits for the server."""

    def __init__(self, launch: Launch, address: str) -> None:
        self._launch = launch
        self._address = address
        self.process: ManagedProcess | None = None

    def start(self) -> Endpoint:
        """Start the process on ports that are free now."""
        launch = self._launch
        port, bootstrap, information = free_ports(self._address, 3)
        words = ["--host", self._address, "--port", str(port)]
        if launch.role != "plain":
            words += ["--disaggregation-mode", launch.role]
        if launch.role == "prefill":
            words += ["--disaggregation-bootstrap-port", str(bootstrap)]
            words += ["--engine-info-bootstrap-port", str(information)]
        self.process = ManagedProcess((*SERVE_COMMAND, *launch.flags, *words), launch)
        host = f"[{self._address}]" if ":" in self._address else self._address
        return Endpoint(
            url=f"http://{host}:{port}",
            bootstrap_port=bootstrap if launch.role == "prefill" else None,
            process_id=self.process.process_id,
        )

    def exit_code(self) -> int | None:
        """None while it runs, and before it was started."""
        return None if self.process is None else self.process.exit_code()

    def drain(self) -> None:
        """Ask the server to let its requests end and to leave."""
        if self.process is not None:
            self.process.drain()

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.process.kill()


def free_ports(address: str, count: int) -> list[int]:
    """Ports of ``address`` that nobody listens on, all different. Somebody may be faster than the server."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(family, socket.SOCK_STREAM)) for _ in range(count)]
        for one in sockets:
            one.bind((address, 0))
        return [int(one.getsockname()[1]) for one in sockets]
