"""A whole server process with ``--grpc-mode``: ports, drain at SIGTERM, an occupied sidecar port."""

from __future__ import annotations

import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2 as pb
from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2_grpc
from tests.support.server import ServerProcess, free_port


def _wait_ready(server: ServerProcess, stub: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if stub.HealthCheck(pb.HealthCheckRequest(), timeout=2).healthy:
                return
        except grpc.RpcError:
            pass
        assert server.process.poll() is None, server.output
        assert time.monotonic() < deadline, server.output
        time.sleep(0.1)


def _options(model: Path, sidecar: int) -> list[str]:
    words = ["--model-path", str(model), "--smg-grpc-mode", "--enable-metrics"]
    return [*words, "--max-total-tokens", "4096", "--smg-http-sidecar-port", str(sidecar)]


def test_serve_and_drain(chain_model: Path, tmp_path: Path) -> None:
    sidecar = free_port()
    with ServerProcess(_options(chain_model, sidecar), tmp_path / "log") as server:
        channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
        stub = sglang_pb2_grpc.SglangServiceStub(channel)  # type: ignore[no-untyped-call]
        _wait_ready(server, stub)
        with urllib.request.urlopen(f"http://127.0.0.1:{sidecar}/metrics", timeout=5) as reply:
            assert b"sglang:" in reply.read()
        request = pb.TextGenerateRequest(
            text="A", sampling_params={"max_new_tokens": 900, "temperature": 0}, options={"stream": True}
        )
        call = stub.TextGenerate(request)
        first = next(call)
        server.process.send_signal(signal.SIGTERM)
        messages = [first, *call]  # what runs is finished
        assert messages[-1].complete.completion_tokens == 900
        assert server.wait_exit(15) == 0, server.output
        with pytest.raises(grpc.RpcError) as caught:
            stub.HealthCheck(pb.HealthCheckRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        channel.close()


def test_an_occupied_sidecar_port_opens_no_grpc_port(chain_model: Path, tmp_path: Path) -> None:
    seen: list[bool] = []
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        sidecar = holder.getsockname()[1]
        with ServerProcess(_options(chain_model, sidecar), tmp_path / "log") as server:
            ended = threading.Event()

            def watch() -> None:
                while not ended.wait(0.02):
                    with socket.socket() as probe:
                        seen.append(probe.connect_ex(("127.0.0.1", server.port)) == 0)

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                assert server.wait_exit(60) not in (0, None)
            finally:
                ended.set()
                watcher.join()
            assert f"{sidecar} for the HTTP sidecar" in server.output
    assert seen and not any(seen)
