"""A prefill and a decode server as real processes, which a test can hold, stop, kill and start again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from sglang_lite import Engine
from tests.support.server import ROOT, free_port
from tests.support.tiny_checkpoints import CASES, save_checkpoint

PREFILL, DECODE = "prefill", "decode"
SIDES = (PREFILL, DECODE)
MODEL_OPTIONS = ("--device", "cpu", "--max-total-tokens", "1024", "--max-running-requests", "4")
SHORT_WAITS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "4",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "8",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1",
}
"""Of sessions: a peer is given up after 2 s of silence, a peer that never comes after 4 s."""

PATIENT = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "5",
}
"""Where nobody dies: on a busy machine both sides may be seconds apart."""


def make_model(directory: Path) -> Path:
    """A tiny checkpoint with room for as many positions as the pools have."""
    save_checkpoint(CASES["qwen3"], directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 1024}))
    return directory


@dataclass(slots=True)
class Answer:
    """What a client got; ``error`` when the connection ended instead."""

    status: int
    body: Any
    seconds: float
    error: str = ""

    @property
    def tokens(self) -> list[int]:
        return list(self.body["output_ids"])

    @property
    def is_failure(self) -> bool:
        """A clear error: a status that says so, an aborted end, or a connection that the kernel closed."""
        if self.error or self.status >= 400:
            return True
        reason = self.body.get("meta_info", {}).get("finish_reason") if isinstance(self.body, dict) else None
        return isinstance(reason, dict) and reason.get("type") == "abort"


@dataclass(slots=True)
class Side:
    """One server."""

    words: list[str]
    port: int
    log: Path
    host: str = "127.0.0.1"
    prefix: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **self.environment}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*self.prefix, *self.words], stdout=output, stderr=output, env=environment, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip

    def signal(self, number: int) -> None:
        """To every process of the server."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(10)

    def terminate(self) -> float:
        """Ask it to end; the seconds that took."""
        assert self.process is not None
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        return time.monotonic() - began


class Pair:
    """Two servers with one model.

    Args:
        backend: of the transfers.
        gated: see ``tests.support.gated_core``.
        with_text: the model has a tokenizer.
        environment: more variables of both servers.
        options: more options of both servers; ``decode_options`` of the decode server only.
    """

    def __init__(
        self,
        backend: str,
        model: Path,
        directory: Path,
        *,
        gated: bool = True,
        with_text: bool = False,
        environment: dict[str, str] | None = None,
        options: Sequence[str] = (),
        decode_options: Sequence[str] = (),
    ) -> None:
        self.backend, self.gate = backend, directory / "gate"
        self.bootstrap_port = free_port()
        self.bootstrap_host = "127.0.0.1"
        module = ["tests.support.gated_core", str(self.gate)] if gated else ["sglang_lite"]
        shared = [
            *([] if with_text else ["--skip-tokenizer-init"]),
            *MODEL_OPTIONS,
            "--disaggregation-verify-checksums",
            "--model-path",
            str(model),
            *options,
        ]
        self.sides: dict[str, Side] = {}
        for role in SIDES:
            port = free_port()
            words = [sys.executable, "-m", *module, "serve", *shared, "--host", "127.0.0.1", "--port", str(port)]
            words += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", backend]
            if role == PREFILL:
                words += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
                words += ["--engine-info-bootstrap-port", "0"]
            else:
                words += decode_options
            self.sides[role] = Side(words, port, directory / f"{role}.log", environment={**(environment or {})})

    def start(self, roles: Sequence[str] = SIDES) -> None:
        """Start servers and wait until they are ready."""
        for role in roles:
            self.sides[role].start()
        asyncio.run(self.wait_ready(roles))

    async def wait_ready(self, roles: Sequence[str] = SIDES, seconds: float = 60.0) -> None:
        async with aiohttp.ClientSession() as session:
            until = time.monotonic() + seconds
            for role in roles:
                side = self.sides[role]
                while await _health(session, side) != 200:
                    assert side.is_running, side.log.read_text()[-3000:]
                    assert time.monotonic() < until, side.log.read_text()[-3000:]
                    await asyncio.sleep(0.05)

    async def revive(self) -> None:
        """Start what was killed, under its address, and let the gate be open."""
        self.gate.unlink(missing_ok=True)
        dead = [role for role in SIDES if not self.sides[role].is_running]
        for role in dead:
            self.sides[role].start()
        await self.wait_ready()

    def close(self) -> None:
        for side in self.sides.values():
            side.signal(signal.SIGCONT)
            side.kill()

    def hold(self, mode: str) -> None:
        """Close the gate; ``open`` lets everything through again."""
        self.gate.write_text(mode)

    def open(self) -> None:
        self.gate.unlink(missing_ok=True)

    def body(self, prompt: list[int], room: int | None = None, count: int = 8, **fields: Any) -> dict[str, Any]:
        return {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
            "bootstrap_host": self.bootstrap_host,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": random.getrandbits(63) if room is None else room,
            **fields,
        }

    async def send(self, role: str, body: dict[str, Any], path: str = "/generate", seconds: float = 30.0) -> Answer:
        """A call to one server."""
        began = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(self.sides[role].url + path, json=body) as reply,
            ):
                text = await reply.text()
                content = json.loads(text) if "json" in reply.content_type else text
                return Answer(reply.status, content, time.monotonic() - began)
        except aiohttp.ClientError as error:
            return Answer(0, None, time.monotonic() - began, error=f"{type(error).__name__}: {error}")

    def both(self, body: dict[str, Any]) -> dict[str, asyncio.Task[Answer]]:
        """The same call to both servers."""
        return {role: asyncio.create_task(self.send(role, body)) for role in SIDES}

    async def loads(self, role: str) -> dict[str, Any]:
        """Of its first replica."""
        return (await self.all_loads(role))[0]

    async def all_loads(self, role: str) -> list[dict[str, Any]]:
        """Of every replica."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
            session.get(self.sides[role].url + "/v1/loads") as reply,
        ):
            loads: list[dict[str, Any]] = (await reply.json())["loads"]
            return loads

    async def until(self, role: str, condition: Callable[[dict[str, Any]], bool], seconds: float = 10.0) -> float:
        """Wait until a server's load is as wanted; the seconds that took."""
        began = time.monotonic()
        while True:
            load = await self.loads(role)
            if condition(load):
                return time.monotonic() - began
            assert time.monotonic() - began < seconds, (role, load, self.sides[role].log.read_text()[-2000:])
            await asyncio.sleep(0.02)

    async def settled(self, seconds: float = 10.0) -> float:
        """Until nobody owns anything on the servers that run; the seconds that took."""
        return max([await self.until(role, is_idle, seconds) for role in SIDES if self.sides[role].is_running])


def is_idle(load: dict[str, Any]) -> bool:
    """No request, no page that somebody holds, no session."""
    queues = load["disaggregation"]
    waiting = sum(value for name, value in queues.items() if name.endswith("_reqs"))
    return load["num_reqs"] == 0 and load["num_used_tokens"] == 0 and waiting == 0


async def _health(session: aiohttp.ClientSession, side: Side) -> int:
    try:
        async with session.get(side.url + "/health", timeout=aiohttp.ClientTimeout(total=2)) as reply:
            return reply.status
    except (aiohttp.ClientError, TimeoutError):
        return 0


class Oracle:
    """One engine without any disaggregation: what the pair has to say."""

    def __init__(self, model: Path) -> None:
        self.engine = Engine(
            model_path=str(model), device="cpu", skip_tokenizer_init=True, max_total_tokens=1024, max_running_requests=4
        )
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def tokens(self, prompt: list[int], count: int = 8) -> list[int]:
        """Greedy output."""
        key = tuple(prompt), count
        if key not in self._known:
            result = self.engine.generate(
                input_ids=prompt,
                sampling_params={"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
            )
            self._known[key] = list(result["output_ids"])
        return self._known[key]

    @classmethod
    @contextlib.contextmanager
    def of(cls, model: Path) -> Iterator[Oracle]:
        """Closed at the end."""
        oracle = cls(model)
        with oracle.engine:
            yield oracle


def prompt_of(seed: int, length: int) -> list[int]:
    """Token ids that two seeds do not share a prefix of."""
    return [(7 * seed + 3 * at + at * at % 11) % 120 + 1 for at in range(length)]
