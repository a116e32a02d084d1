"""Servers that tell routers of themselves: registered, again when forgotten, gone at the end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestServer

from sglang_lite.config import ServerConfig
from sglang_lite.router.app import make_app
from sglang_lite.router.context import RouterContext
from sglang_lite.router.options import RouterOptions, checked
from sglang_lite.server.router_registration import RouterRegistrations, advertised_url, check_fleet_options
from sglang_lite.server.run import launch_command
from sglang_lite.types import StartupError
from tests.support.null_workers import NullWorker, router_over
from tests.support.server import ServerProcess, free_port


@asynccontextmanager
async def router_at(port: int, **options: Any) -> AsyncIterator[RouterContext]:
    context = RouterContext(checked(RouterOptions(**options)))
    server = TestServer(make_app(context), host="127.0.0.1", port=port)
    await server.start_server()
    try:
        yield context
    finally:
        await server.close()


@asynccontextmanager
async def serving() -> AsyncIterator[NullWorker]:
    worker = NullWorker()
    await worker.server.start_server()
    try:
        yield worker
    finally:
        await worker.server.close()


def config_for(router_port: int, worker: NullWorker, **options: Any) -> ServerConfig:
    routers = [f"http://127.0.0.1:{router_port}/"]
    return ServerConfig(model_path="m", device="cpu", router_url=routers, advertise_url=worker.url, **options)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


async def test_a_server_comes_and_goes() -> None:
    port = free_port()
    async with serving() as worker, router_at(port) as context:
        registrations = RouterRegistrations(config_for(port, worker, api_key="its-own"), 1)
        registrations.start()
        await until(lambda: bool(context.registry.registered()))
        (found,) = context.registry.registered()
        assert (found.url, found.api_key, found.role) == (worker.url, "its-own", "regular")
        await registrations.leave()
        assert context.registry.workers == {} and context.tasks == {}


async def test_roles_are_told() -> None:
    port = free_port()
    async with serving() as worker, router_at(port, pd_disaggregation=True) as context:
        options = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9123}
        registrations = RouterRegistrations(config_for(port, worker, **options), 1)
        worker.info["disaggregation_mode"] = "prefill"
        registrations.start()
        await until(lambda: bool(context.registry.registered()))
        (found,) = context.registry.registered()
        assert (found.role, found.bootstrap_port) == ("prefill", 9123)
        await registrations.leave()


async def test_a_router_that_comes_later_and_one_that_forgets(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    async with serving() as worker:
        registrations = RouterRegistrations(config_for(port, worker), 1, look_seconds=0.02)
        with caplog.at_level(logging.WARNING):
            registrations.start()
            await until(lambda: "trying on" in caplog.text)
        for _ in range(2):
            async with router_at(port) as context:
                await until(lambda context=context: bool(context.registry.registered()))  # type: ignore[misc]
        # The router is away at the end: leaving takes no longer for that.
        async with asyncio.timeout(20):
            await registrations.leave()


async def test_another_process_takes_the_place_of_the_one_before() -> None:
    port = free_port()
    async with serving() as worker, router_at(port) as context:
        first, second = (RouterRegistrations(config_for(port, worker), 1, look_seconds=0.02) for _ in range(2))
        first.start()
        await until(lambda: bool(context.registry.registered()))
        (old,) = context.registry.registered()
        old.breaker.fail(0.0)
        second.start()
        await until(lambda: context.registry.workers.get(worker.url) not in (None, old))
        new = context.registry.workers[worker.url]
        assert new.labels["instance"] != old.labels["instance"] and new.breaker is not old.breaker
        await until(lambda: new.registered)
        await asyncio.sleep(0.1)  # several looks: neither of them registers once more
        assert context.registry.workers == {worker.url: new}
        await first.leave()
        await second.leave()


async def test_the_same_process_is_taken_once() -> None:
    async with serving() as worker, router_over() as router:
        body = {"url": worker.url, "labels": {"instance": "i"}}
        assert (await router.post("/workers", body))[0] == 202
        kept = router.context.registry.workers[worker.url]
        assert (await router.post("/workers", body))[0] == 202
        assert router.context.registry.workers == {worker.url: kept}
        status, _, answer = await router.post("/workers", {"url": worker.url})
        assert status == 400 and b"twice" in answer


async def test_keys_of_routers(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    async with serving() as worker, router_at(port, api_key="k") as context:
        wrong = RouterRegistrations(config_for(port, worker, router_api_key="other"), 1)
        with caplog.at_level(logging.WARNING):
            wrong.start()
            await until(lambda: "401" in caplog.text)
        await wrong.leave()
        assert context.registry.workers == {}
        right = RouterRegistrations(config_for(port, worker, router_api_key="k"), 1)
        right.start()
        await until(lambda: bool(context.registry.workers))
        await right.leave()
        assert context.registry.workers == {}


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**options: Any) -> ServerConfig:
        return ServerConfig(model_path="m", device="cpu", **options)

    router = "http://127.0.0.1:1"
    assert advertised_url(config(host="10.0.0.1"), 5, router) == "http://10.0.0.1:5"
    assert advertised_url(config(host="0.0.0.0", grpc_mode=True), 5, router) == "grpc://127.0.0.1:5"
    assert advertised_url(config(host="fd00::1", ssl_certfile="c", ssl_keyfile="k"), 5, router) == "https://[fd00::1]:5"
    assert advertised_url(config(advertise_url="http://name:7/"), 5, router) == "http://name:7"
    for wrong in (
        {"router_url": ["ftp://x"]},
        {"router_url": ["http://"]},
        {"router_url": [router], "advertise_url": "host"},
        {"advertise_url": "http://a"},
        {"router_api_key": "k"},
    ):
        with pytest.raises(StartupError):
            check_fleet_options(config(**wrong))
    assert config(router_url=[router], router_api_key="secret").public()["router_api_key"] == "******"
    assert "secret" not in launch_command(["serve", "--router-api-key", "secret"])


async def test_a_rolling_restart_under_load_loses_no_request(chain_model: Path, tmp_path: Path) -> None:
    """Real servers, one over HTTP and one over gRPC, restarted one after the other behind the router."""
    port, sidecar = free_port(), free_port()
    words = ["--model-path", str(chain_model), "--served-model-name", "m", "--max-total-tokens", "8192"]
    words += ["--router-url", f"http://127.0.0.1:{port}"]
    grpc_words = [*words, "--grpc-mode", "--smg-http-sidecar-port", str(sidecar)]
    done, statuses, streams = asyncio.Event(), list[int](), list[bytes]()

    async def client(session: aiohttp.ClientSession, stream: bool) -> None:
        sampling = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
        body = {"model": "m", "text": "A", "stream": stream, "sampling_params": sampling}
        while not done.is_set():
            async with session.post(f"http://127.0.0.1:{port}/generate", json=body) as response:
                data = await response.read()
                statuses.append(response.status)
                if stream:
                    streams.append(data)
                else:
                    assert msgspec.json.decode(data).get("text") == "BCDA" * 15, data

    def names(context: RouterContext) -> set[str]:
        return {worker.url for worker in context.registry.registered()}

    async with (
        router_at(port, policy="round_robin", retry_initial_backoff_ms=10.0) as context,
        AsyncExitStack() as stack,
    ):
        by_http = stack.enter_context(ServerProcess(words, tmp_path / "http"))
        by_grpc = stack.enter_context(ServerProcess(grpc_words, tmp_path / "grpc"))
        async with asyncio.timeout(100):
            both = {by_http.url, by_grpc.url.replace("http", "grpc")}
            while names(context) != both:
                assert by_http.process.poll() is None and by_grpc.process.poll() is None
                await asyncio.sleep(0.05)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            clients = [asyncio.create_task(client(session, index % 2 == 0)) for index in range(4)]
            for index, (server, arguments) in enumerate(((by_http, words), (by_grpc, grpc_words))):
                before = len(statuses)
                while len(statuses) < before + 8:
                    await asyncio.sleep(0.02)
                server.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(server.wait_exit, 30) == 0, server.output
                assert len(names(context)) == 1
                log = tmp_path / f"again{index}"
                stack.enter_context(ServerProcess(arguments, log, port=server.port))
                while names(context) != both:
                    await asyncio.sleep(0.05)
            done.set()
            await asyncio.gather(*clients)
    assert set(statuses) == {200}
    assert all(data.endswith(b"data: [DONE]\n\n") and b'"error"' not in data for data in streams) and streams


@pytest.mark.parametrize("suspected", [False, True])
async def test_one_that_was_killed_is_forgotten_and_one_that_somebody_named_is_not(suspected: bool) -> None:
    """A server that is killed cannot leave."""
    killed, named = NullWorker(), NullWorker()
    options = {"worker_startup_timeout_secs": 0.1, "worker_startup_check_interval": 0.01}
    options |= {"health_check_interval_secs": 60.0 if suspected else 0.01}
    async with router_over(named, **options) as router:
        await killed.server.start_server()
        await router.post("/workers", {"url": killed.url, "labels": {"instance": "one"}})
        await router.registered(2)
        gone, kept = killed.url, named.url
        workers = dict(router.context.registry.workers)
        await named.server.close()
        await killed.server.close()
        if suspected:
            await until(lambda: set(router.context.suspects) == set(workers))
            for worker in workers.values():
                router.context.suspect(worker)
        await until(lambda: gone not in router.context.registry.workers)
        assert set(router.context.tasks) == {kept}
        assert not router.context.tasks[kept].done()
