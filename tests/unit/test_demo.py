"""The demo program's parts that need no server."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sglang_lite import demo


def test_port_that_is_taken_is_avoided() -> None:
    with socket.socket() as listener:
        listener.bind((demo.HOST, 0))
        listener.listen()
        taken = listener.getsockname()[1]
        chosen = demo.choose_port(taken)
        assert chosen not in (0, taken)
    assert demo.choose_port(taken) == taken


@pytest.mark.parametrize("line", [b"\n", b": comment\n", b"data: [DONE]\n", b"event: x\n"])
def test_lines_without_an_event(line: bytes) -> None:
    assert demo.parse_event(line) is None


def test_error_event_ends_the_demo() -> None:
    with pytest.raises(demo.DemoError, match="out of pages"):
        demo.parse_event(b'data: {"error": {"message": "out of pages"}}\n')


def answer_once(listener: socket.socket, response: bytes) -> None:
    """Read one request and send ``response``."""
    connection, _ = listener.accept()
    with connection:
        while b'"stream": true' not in connection.recv(65536):
            pass
        connection.sendall(response)


def converse(response: bytes) -> str:
    """The text the demo makes of a raw HTTP response."""
    with socket.create_server((demo.HOST, 0)) as listener:
        thread = threading.Thread(target=answer_once, args=(listener, response))
        thread.start()
        try:
            return "".join(demo.stream_chat(listener.getsockname()[1], "hi"))
        finally:
            thread.join(10)


def test_pieces_are_joined() -> None:
    events = b"".join(
        b'data: {"choices": [{"delta": %s}]}\n\n' % delta
        for delta in (b'{"role": "assistant"}', b'{"content": "Gra"}', b'{"content": "vity"}')
    )
    body = events + b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n'
    assert converse(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body) == "Gravity"


def test_refused_request_ends_the_demo() -> None:
    with pytest.raises(demo.DemoError, match="503"):
        converse(b"HTTP/1.1 503 Unavailable\r\nConnection: close\r\nContent-Length: 5\r\n\r\nlater")


def test_broken_connection_ends_the_demo() -> None:
    with pytest.raises(demo.DemoError, match="broke"):
        converse(b"")


def test_usage_names_the_port() -> None:
    text = demo.usage(4321)
    assert "curl http://127.0.0.1:4321/v1/chat/completions" in text
    assert 'base_url="http://127.0.0.1:4321/v1"' in text


STUBBORN = """
import signal, sys
# Taken one by one: a handler could be entered again while it still says that it was asked.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("up", flush=True)
for _ in range(2):
    signal.sigwait([signal.SIGTERM])
    print("asked", flush=True)
"""


def test_server_that_was_told_to_stop_is_no_failure(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as server:
        assert demo.serve_on(server, tmp_path / "unread.log") == 0


def test_server_that_failed_is_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("the reason\n")
    failing = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with failing as server, pytest.raises(demo.DemoError, match="exit code 3:\nthe reason"):
        demo.serve_on(server, log)


def test_second_interrupt_reaches_the_draining_server() -> None:
    # Whatever ran in this process before may have left another handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _interrupt_twice()
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt_twice() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        output = server.stdout
        assert output.readline() == b"up\n"

        def interrupt_once_asked() -> None:
            output.readline()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt_once_asked)
        thread.start()
        try:
            demo.stop_server(server)
            thread.join(10)
        finally:
            server.kill()
        assert server.returncode == 0
