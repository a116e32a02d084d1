"""Options and files of the router (C930, C932), and its process (C909, C910)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from sglang_lite.router.options import REFUSED, RouterOptions, checked, parse_options
from sglang_lite.types import StartupError
from tests.support.null_workers import NullWorker
from tests.support.server import ROOT, free_port


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('discovery: {backend: static_urls, urls: ["http://a", "http://a/"]}', "given twice"),
        ('discovery: {backend: static_urls, urls: ["ftp://a"]}', "ftp://a"),
        ('discovery: {backend: static_urls, urls: [""]}', "discovery.urls"),
        ("discovery: {backend: zoo}", "discovery.backend"),
        ("models: [{id: m, policy: best}]", "policy"),
        ("models: [{id: m, circuit_breaker: {failure_threshold: 0}}]", "cb-failure-threshold"),
        ("discovery: {backend: k8s, label_selector: a=b, prefill_selector: c=d}", "label_selector"),
        ("discovery: {backend: k8s, prefill_selector: c=d, decode_selector: c=d}", "must differ"),
        ("discovery: {backend: k8s, label_selector: a in (b)}", "label_selector"),
        ("discovery: {backend: k8s, prefill_selector: c=d}", "decode-selector"),
        ("discovery: {backend: k8s, label_selector: a!=b}", "selector"),
        ("discovery: {backend: k8s, label_selector: ''}", "selector"),
        ("discovery: {backend: k8s, label_selector: a=b, port: 0}", "port"),
        ("discovery: {backend: k8s, label_selector: a=b, resource: nodes}", "resource"),
        ("servers: {}", "servers"),
        ("server: {hots: x}", "server.hots"),
    ],
)
def test_wrong_files(text: str, words: str, tmp_path: Path) -> None:
    """C930, C932: the message names the field."""
    file = tmp_path / "router.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(StartupError, match=words.replace("(", r"\(")):
        parse_options(["--config", str(file)])


def test_file_and_command_line(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(
        'models = [{id = "m", policy = "random", cache_aware = {match_threshold = 0.4}}]\n[server]\nport = 7\n'
        '[discovery]\nbackend = "static_urls"\nurls = ["http://a:1/"]\n[active_load]\nstale_request_timeout_secs = 5\n',
        encoding="utf-8",
    )
    options = parse_options(["--config", str(file), "--port", "8"])
    assert (options.port, options.policy, options.worker_urls) == (8, "random", ("http://a:1",))
    assert (options.stale_request_timeout_secs, options.cache_threshold, options.models) == (5, 0.4, ("m",))
    paired = parse_options(["--prefill", "http://p", "9000", "--prefill", "http://q", "none", "--decode", "http://d"])
    assert (paired.prefill, paired.decode) == ((("http://p", 9000), ("http://q", None)), ("http://d",))


@pytest.mark.parametrize("name", REFUSED)
def test_options_without_an_implementation_end_the_start(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options([f"--{name}", "1"])
    assert f"--{name}: not supported" in capsys.readouterr().err


def test_wrong_values() -> None:
    for options in ({"port": 70000}, {"policy": "best"}, {"worker_urls": ("grpc://a",)}, {"cache_threshold": 2.0}):
        with pytest.raises(StartupError):
            checked(RouterOptions(**options))  # type: ignore[arg-type]


async def test_running_streams_end_before_the_process_does() -> None:
    """C909, C910."""
    worker, began = NullWorker(), asyncio.Semaphore(0)

    async def answer(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        began.release()
        for number in range(8):
            await response.write(b"data: %d\n\n" % number)
            await asyncio.sleep(0.06)
        await response.write(b"data: [DONE]\n\n")
        return response

    worker.answer = answer
    await worker.server.start_server()
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = ["router", "--worker-urls", worker.url, "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "sglang_lite", *words, env=environment)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(30):
            while True:
                try:
                    async with session.get(url + "/readyz") as response:
                        if response.status == 200:
                            break
                except aiohttp.ClientConnectionError:
                    pass
                await asyncio.sleep(0.05)

            async def stream() -> bytes:
                async with session.post(url + "/generate", json={"text": "x", "stream": True}) as response:
                    return await response.read()

            clients = [asyncio.create_task(stream()) for _ in range(100)]
            for _ in clients:
                await began.acquire()
            process.send_signal(signal.SIGTERM)
            bodies = await asyncio.gather(*clients)
            assert all(body.endswith(b"data: 7\n\ndata: [DONE]\n\n") for body in bodies)
            with pytest.raises(ConnectionError):
                await asyncio.open_connection("127.0.0.1", port)
            assert await asyncio.wait_for(process.wait(), 1) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await worker.server.close()
