"""Acceptance cases of the router to the letter, where other tests show less: C902, C910, C911, C919, C926, C930."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from sglang_lite.router.options import parse_options
from sglang_lite.router.policies import CacheAware, PolicyLimits
from sglang_lite.router.prompt import Prompt
from sglang_lite.types import StartupError
from tests.router.test_pairs_and_control import decode, prefill
from tests.router.test_proxy import CHAT, CHAT_PATH, code_of, fixed, hang
from tests.router.test_pure_parts import make_workers
from tests.support.null_workers import NullWorker, router_over
from tests.support.server import ROOT, free_port

ERROR_CODE = "x-router-error-code"


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("other model", 404, "model_not_found"),
        ("hangs", 502, "upstream_timeout"),
        ("gone", 502, "upstream_unreachable"),
    ],
)
async def test_every_error_has_its_code_in_a_header_and_no_address(fault: str, status: int, code: str) -> None:
    """C902."""
    worker = NullWorker()
    options: dict[str, Any] = {"request_timeout_secs": 0.2} if fault == "hangs" else {}
    async with router_over(worker, **options) as router:
        port = worker.url.rpartition(":")[2].encode()
        worker.answer = hang if fault == "hangs" else None
        if fault == "gone":
            await worker.server.close()
        began = time.monotonic()
        got, headers, body = await router.post(CHAT_PATH, {**CHAT, "model": fault} if "model" in fault else CHAT)
        assert (got, headers[ERROR_CODE], code_of(body)) == (status, code, code)
        assert time.monotonic() - began < 1.0
        assert port not in body


async def test_an_idle_router_ends_at_once() -> None:
    """C910, with time for a busy machine; the grace period is 180 s."""
    port = free_port()
    words = ["router", "--worker-urls", "http://127.0.0.1:1", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "sglang_lite", *words, env=environment)
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(30):
            while True:
                try:
                    async with session.get(f"http://127.0.0.1:{port}/healthz") as response:
                        assert response.status == 200
                        break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20.0) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_breaker_stays_open_for_its_time() -> None:
    """C911: three failures, nothing for 30 s or another worker, then one probe."""
    worker, other = NullWorker(), NullWorker()
    worker.answer = fixed(500)
    async with router_over(worker, disable_retries=True) as router:
        breaker = router.context.registry.workers[worker.url].breaker
        for _ in range(3):
            assert (await router.post(CHAT_PATH, CHAT))[0] == 500
        status, headers, body = await router.post(CHAT_PATH, CHAT)
        assert (status, code_of(body), headers[ERROR_CODE]) == (503, "breaker_open", "breaker_open")
        assert len(worker.seen) == 3
        now = router.context.now
        assert not breaker.allows(now + 29.0)
        assert breaker.allows(now + 30.0)
        await other.server.start_server()
        try:
            assert (await router.post("/workers", {"url": other.url}))[0] == 202
            await router.registered(2)
            for _ in range(4):
                status, _, body = await router.post(CHAT_PATH, CHAT)
                assert (status, msgspec.json.decode(body)["worker"]) == (200, other.url)
            breaker._opened -= 30.0
            assert breaker.acquire(now) and not breaker.acquire(now)
            breaker.succeed()
            assert breaker.state.name == "CLOSED"
        finally:
            await other.server.close()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/classify", "/v1/score", "/v1/responses"])
async def test_pairs_are_not_asked_for_what_they_do_not_serve(path: str) -> None:
    """C919."""
    one, two = prefill(), decode()
    async with router_over(one, two) as router:
        status, _, body = await router.post(path, {"model": "m", "input": "x"})
        assert (status, code_of(body)) == (400, "bad_request")
        assert not one.seen and not two.seen


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ((33, 0, 1), 1),  # out of balance: the least loaded
        ((32, 0, 1), 0),  # not more than 32 apart
        ((440, 400, 400), 0),  # not more than 1.1 times
        ((441, 401, 400), 2),
    ],
)
def test_both_measures_of_imbalance(loads: tuple[int, int, int], chosen: int) -> None:
    """C926: more than 32 apart, and more than 1.1 times."""
    workers, policy, prompt = make_workers(3), CacheAware(PolicyLimits()), Prompt(b"k" * 400)
    policy.sent(workers[0], prompt)
    for worker, load in zip(workers, loads, strict=True):
        worker.running = load
    assert policy.choose(workers, prompt) is workers[chosen]


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--worker-urls", "http://a:1", "http://a:1/"], "--worker-urls"),
        (["--worker-urls", "ftp://a:1"], "--worker-urls"),
        (["--prefill", "http://a:1", "8998", "--decode", "http://a:1/"], "--decode"),
        (["--worker-urls", "http://a:1", "--cb-failure-threshold", "0"], "cb-failure-threshold"),
    ],
)
def test_the_message_names_the_field(words: list[str], field: str) -> None:
    """C930, on the command line."""
    with pytest.raises(StartupError, match=field):
        parse_options(words)


def test_an_unknown_policy_ends_the_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """C930."""
    with pytest.raises((StartupError, SystemExit)) as caught:
        parse_options(["--worker-urls", "http://a:1", "--policy", "best"])
    assert "policy" in str(caught.value) + capsys.readouterr().err
