"""``sglang-lite pd-demo``: a prefill server, a decode server and a dispatcher, and one chat through them.

The dispatcher is all that a router has to do: it puts the address of the prefill server's bootstrap service and a room
of its own into each request and sends it to both servers; the client gets what the decode server answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from sglang_lite import demo
from sglang_lite.configuration.options.disaggregation import TRANSFER_BACKENDS
from sglang_lite.demo import HOST, QUESTION, DemoError
from sglang_lite.demo_model import DEMO_NAME
from sglang_lite.types import StartupError

PREFERRED_PORT = 30000
_DISPATCHED = ("/generate", "/v1/completions", "/v1/chat/completions")
_ROOMS = 1 << 63


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where everything is, all on the loopback interface."""

    prefill: int
    bootstrap: int
    decode: int
    dispatcher: int


def main(words: Sequence[str]) -> int:
    """Run the demonstration. Returns the exit code of the process."""
    parser = argparse.ArgumentParser(prog="sglang-lite pd-demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model-path", default=DEMO_NAME, help="a model directory, or 'demo'")
    backends = [name for name in TRANSFER_BACKENDS if name not in ("ascend", "mori")]
    parser.add_argument("--transfer-backend", choices=backends, default="tcp", help="what moves the pages (tcp)")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--max-tokens", type=int, default=demo.MAX_TOKENS, help="most tokens of the answer")
    parser.add_argument("--exit", action="store_true", help="end after the answer instead of serving until Ctrl-C")
    options = parser.parse_args(list(words))
    try:
        with tempfile.TemporaryDirectory(prefix="sglang-lite-pd-demo-") as directory:
            return _run(options, Path(directory))
    except (StartupError, DemoError) as error:
        print(f"pd-demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace, directory: Path) -> int:
    ports = [demo.choose_port(PREFERRED_PORT), *(demo.choose_port(0) for _ in range(3))]
    places = Addresses(dispatcher=ports[0], prefill=ports[1], decode=ports[2], bootstrap=ports[3])
    with contextlib.ExitStack() as stack:
        servers = []
        for role, port in (("prefill", places.prefill), ("decode", places.decode)):
            log = directory / f"{role}.log"
            servers.append((stack.enter_context(_server(role, port, places, options, log)), port, log))
        for (server, port, log), role in zip(servers, ("prefill", "decode"), strict=True):
            demo.wait_until_ready(server, port, log, f"{role} server")
        stack.enter_context(_dispatching(places))
        print(f"\nYou: {options.question}\nModel: ", end="", flush=True)
        text = ""
        model = _model_name(places.decode)
        for piece in demo.stream_chat(places.dispatcher, options.question, model, options.max_tokens):
            text += piece
            print(piece, end="", flush=True)
        print("\n")
        if not text.strip():
            raise DemoError("the model answered without text")
        print(_report(places, options.transfer_backend))
        if not options.exit:
            print(f"Serving at http://{HOST}:{places.dispatcher}/v1 until Ctrl-C.", flush=True)
            return demo.serve_on(servers[1][0], servers[1][2])
        return 0


@contextlib.contextmanager
def _server(
    role: str, port: int, places: Addresses, options: argparse.Namespace, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "sglang_lite", "serve", "--model-path", options.model_path, "--device", "cpu"]
    command += ["--host", HOST, "--port", str(port), "--max-total-tokens", "4096"]
    command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", options.transfer_backend]
    if role == "prefill":
        command += ["--disaggregation-bootstrap-port", str(places.bootstrap), "--engine-info-bootstrap-port", "0"]
    print(f"{role} server at http://{HOST}:{port}, pages over {options.transfer_backend}", file=sys.stderr, flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        demo.stop_server(process)


@contextlib.contextmanager
def _dispatching(places: Addresses) -> Iterator[None]:
    """The dispatcher, on an event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="dispatcher", daemon=True)
    thread.start()
    runner = web.AppRunner(dispatcher(places), access_log=None)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, HOST, places.dispatcher).start()

    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


def dispatcher(places: Addresses) -> web.Application:
    """An application that gives every request a pair of servers."""

    async def dispatch(request: web.Request) -> web.StreamResponse:
        try:
            body: dict[str, Any] = await request.json()
        except ValueError:
            return web.json_response({"error": {"message": "the body is not JSON"}}, status=400)
        room = {"bootstrap_room": random.randrange(_ROOMS)}
        body |= {"bootstrap_host": HOST, "bootstrap_port": places.bootstrap, **room}
        async with ClientSession(timeout=ClientTimeout(total=None)) as session:
            prefill = asyncio.create_task(_discard(session, f"http://{HOST}:{places.prefill}{request.path}", body))
            try:
                return await _pass(session, f"http://{HOST}:{places.decode}{request.path}", body, request)
            except ClientError as error:
                return web.json_response({"error": {"message": f"the decode server: {error}"}}, status=502)
            finally:
                # With an answer the prefill side is done; without one it must not wait for a decode side.
                prefill.cancel()

    app = web.Application()
    for path in _DISPATCHED:
        app.router.add_post(path, dispatch)
    return app


async def _discard(session: ClientSession, url: str, body: dict[str, Any]) -> None:
    with contextlib.suppress(ClientError):
        async with session.post(url, json=body) as reply:
            await reply.read()


async def _pass(session: ClientSession, url: str, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    async with session.post(url, json=body) as reply:
        answer = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.headers["Content-Type"]})
        await answer.prepare(request)
        async for chunk in reply.content.iter_any():
            await answer.write(chunk)
        await answer.write_eof()
        return answer


def _get(port: int, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=10) as reply:
        content: dict[str, Any] = json.load(reply)
        return content


def _model_name(port: int) -> str:
    name: str = _get(port, "/v1/models")["data"][0]["id"]
    return name


def _report(places: Addresses, backend: str) -> str:
    """What was moved, as the decode server counts it."""
    load = _get(places.decode, "/v1/loads?include=disagg")["loads"][0]["disaggregation"]
    return (
        f"{backend} moved {load['bytes']:,} bytes of KV in {load['spans']} pages, "
        f"{load['kv_transfer_latency_ms']:.1f} ms from the request for them to the last byte."
    )
