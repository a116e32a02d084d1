"""``python -m sglang_lite.demo``: start a server with the demo model on the CPU and talk to it once.

Prints the answer as it streams and how to call the server, then serves until Ctrl-C. With ``KEEP_RUNNING=0`` in the
environment it stops after the answer; the exit code is 0 only when text came. Uses the standard library as a client.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from sglang_lite.demo_model import DEMO_NAME, materialize_in_cache
from sglang_lite.observability.progress import ProgressLine
from sglang_lite.types import StartupError

HOST = "127.0.0.1"
PREFERRED_PORT = 30000
QUESTION = "What is gravity? Answer in two sentences."
MAX_TOKENS = 96
START_TIMEOUT = 300.0
STOP_TIMEOUT = 40.0
_LOG_LINES = 20


class DemoError(Exception):
    """The demo could not go on; the message says why."""


def main() -> int:
    """Run the demo. Returns the exit code of the process."""
    keep_running = os.environ.get("KEEP_RUNNING", "1") != "0"
    try:
        with ProgressLine("Converting the demo model") as progress:
            materialize_in_cache(progress.update)
        with tempfile.NamedTemporaryFile("w+", prefix="sglang-lite-demo-", suffix=".log") as log:
            return _run(keep_running, log)
    except (StartupError, DemoError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(keep_running: bool, log: IO[str]) -> int:
    port = choose_port(PREFERRED_PORT)
    command = [sys.executable, "-m", "sglang_lite", "serve", "--model-path", DEMO_NAME]
    command += ["--device", "cpu", "--host", HOST, "--port", str(port)]
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until_ready(server, port, Path(log.name))
        print(f"\nYou: {QUESTION}\nModel: ", end="", flush=True)
        text = ""
        for piece in stream_chat(port, QUESTION):
            text += piece
            print(piece, end="", flush=True)
        print("\n")
        if not text.strip():
            raise DemoError("the model answered without text")
        print(usage(port))
        if keep_running:
            print("Serving until Ctrl-C.", flush=True)
            return serve_on(server, Path(log.name))
        return 0
    finally:
        stop_server(server)


def choose_port(preferred: int) -> int:
    """``preferred`` when nothing listens there, else any free port."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            chosen: int = probe.getsockname()[1]
            return chosen
    raise DemoError(f"no free port on {HOST}")


def stream_chat(port: int, question: str, model: str = DEMO_NAME, max_tokens: int = MAX_TOKENS) -> Iterator[str]:
    """The pieces of the answer to one user message, as the server streams them.

    Raises:
        DemoError: the server refused the request, failed while answering, or the connection broke.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise DemoError(f"the server answered {response.status}: {response.read(2000).decode(errors='replace')}")
        for line in response:
            event = parse_event(line)
            if event is None:
                continue
            for choice in event.get("choices", ()):
                yield choice["delta"].get("content") or ""
    except (OSError, http.client.HTTPException) as error:
        raise DemoError(f"the connection to the server broke: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The JSON of one line of a server-sent event stream; None for blank lines and the end mark.

    Raises:
        DemoError: the event is an error.
    """
    text = line.decode("utf-8").strip()
    if not text.startswith("data:") or text.endswith("[DONE]"):
        return None
    event: dict[str, Any] = json.loads(text.removeprefix("data:"))
    if "error" in event:
        raise DemoError(f"the server failed while answering: {event['error']}")
    return event


def usage(port: int) -> str:
    """How to call the running server, for a person to copy."""
    url = f"http://{HOST}:{port}/v1"
    return f"""Call it with curl:

  curl {url}/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{DEMO_NAME}", "messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 64}}'

or with the OpenAI SDK (pip install openai):

  from openai import OpenAI
  client = OpenAI(base_url="{url}", api_key="none")
  answer = client.chat.completions.create(
      model="{DEMO_NAME}", messages=[{{"role": "user", "content": "Hello!"}}], max_tokens=64)
  print(answer.choices[0].message.content)
"""


def wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path, name: str = "server") -> None:
    """Wait for ``/health``, and show how long it takes.

    Args:
        name: what to call it.

    Raises:
        DemoError: the server ended, or takes too long; with the end of its log.
    """
    started = time.monotonic()
    terminal = sys.stderr.isatty()
    if not terminal:
        print(f"Starting the {name} ...", file=sys.stderr, flush=True)
    while not _is_healthy(port):
        elapsed = time.monotonic() - started
        if server.poll() is not None:
            raise DemoError(f"the {name} ended with exit code {server.returncode}:\n{last_lines(log)}")
        if elapsed > START_TIMEOUT:
            raise DemoError(f"the {name} is not ready after {START_TIMEOUT:.0f} s:\n{last_lines(log)}")
        if terminal:
            print(f"\rStarting the {name} ... {elapsed:4.1f} s", end="", file=sys.stderr, flush=True)
        time.sleep(0.1)
    lead = "\r" if terminal else ""
    print(f"{lead}The {name} is ready after {time.monotonic() - started:.1f} s.", file=sys.stderr, flush=True)


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def serve_on(server: subprocess.Popen[bytes], log: Path) -> int:
    try:
        code = server.wait()
    except KeyboardInterrupt:
        print("\nStopping the server (again to end running requests at once) ...", file=sys.stderr, flush=True)
        return 0
    if code == 0:
        print("The server was told to stop.", file=sys.stderr, flush=True)
        return 0
    raise DemoError(f"the server ended with exit code {code}:\n{last_lines(log)}")


def stop_server(server: subprocess.Popen[bytes]) -> None:
    """Ask the server to drain and end; hurry it when asked again; end it when it does not."""
    if server.poll() is not None:
        return
    try:
        try:
            server.terminate()
            server.wait(STOP_TIMEOUT)
        except KeyboardInterrupt:
            # The server takes a second signal as: do not wait for running requests.
            server.terminate()
            server.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def last_lines(log: Path) -> str:
    """Of what a server has printed."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:])


def on_terminate(number: int, frame: object) -> None:
    """End as on Ctrl-C, so that the server is stopped too."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, on_terminate)
    sys.exit(main())
