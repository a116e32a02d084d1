"""A whole ``sglang-lite fleet`` process, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import psutil

from sglang_lite.fleet.registrar import READY_LINE
from tests.support.server import ROOT, free_port


class FleetProcess:
    """``python -m sglang_lite fleet`` with a router of its own. Leaving the context ends it."""

    def __init__(
        self,
        arguments: Iterable[str],
        flags: Iterable[str],
        directory: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.logs = directory / "logs"
        self._output = directory / "fleet.log"
        words = ["fleet", *arguments, "--router-host", "127.0.0.1", "--router-port", str(self.port)]
        words += ["--check-seconds", "0.2", "--drain-seconds", "10", "--log-directory", str(self.logs), "--", *flags]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})}
        self.key = variables.get("SGLANG_LITE_API_KEY")
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang_lite", *words],
                stdout=output,
                stderr=output,
                env=variables,
                cwd=directory,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def output(self) -> str:
        """What the fleet and its servers have printed."""
        logs = [self._output, *sorted(self.logs.glob("*.log"))]
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')}" for log in logs)

    def until(self, what: Callable[[], Any], seconds: float = 120.0) -> Any:
        """The first true value of ``what``."""
        deadline = time.monotonic() + seconds
        while not (value := what()):
            assert self.process.poll() is None, f"the fleet ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.output}"
            time.sleep(0.05)
        return value

    def wait_ready(self, times: int = 1, seconds: float = 120.0) -> None:
        """Until the fleet has been complete ``times`` times."""
        self.until(lambda: self._output.read_text(errors="replace").count(READY_LINE) >= times, seconds)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """One request to the router."""
        headers = {"content-type": "application/json"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def generate(self, text: str = "A", tokens: int = 4) -> str:
        """The text that a replica generates."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        status, reply = self.call("POST", "/generate", {"text": text, "sampling_params": sampling})
        assert status == 200, (reply, self.output)
        return str(reply["text"])

    def workers(self) -> dict[str, dict[str, Any]]:
        """Registered workers of the router by address."""
        found = self.call("GET", "/workers")[1]["workers"]
        return {worker["url"]: worker for worker in found if worker["is_registered"]}

    def stop(self, number: int = signal.SIGTERM, seconds: float = 40.0) -> int:
        """Signal the fleet, and its exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=seconds)


def server_at(url: str) -> psutil.Process:
    """The process of ``serve`` that listens at ``url``."""
    port = url.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        is_server = "serve" in words and "sglang_lite.fleet.keeper" not in words
        if is_server and "--port" in words and words[words.index("--port") + 1] == port:
            return process
    raise AssertionError(f"no server at {url}")


def family_of(url: str) -> list[psutil.Process]:
    """The server at ``url``, its keeper and everything that it started."""
    server = server_at(url)
    keeper = server.parent()
    assert keeper is not None
    return [keeper, server, *server.children(recursive=True)]


def wait_gone(processes: Iterable[psutil.Process], seconds: float = 20.0) -> None:
    """Fails when one of them still runs after ``seconds``."""
    _, alive = psutil.wait_procs(list(processes), timeout=seconds)
    left = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not left, [process.cmdline() for process in left]
