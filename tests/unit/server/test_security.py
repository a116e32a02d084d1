"""Keys, tenants, TLS and the limits of concurrency."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web

from sglang_lite.config import ServerConfig
from sglang_lite.server.auth import OPEN_ROUTES, is_key, may_pass, presented_key
from sglang_lite.server.tenants import Tenant, Tenants
from sglang_lite.server.tls import Certificates, SecurePort
from sglang_lite.types import RequestError, StartupError
from tests.support.fake_engine import FakeEngine
from tests.unit.server.test_routes import serving


async def test_every_route_is_closed_unless_it_is_named_open() -> None:
    """A route that somebody adds and forgets in the tables needs the key."""
    async with serving(FakeEngine(api_key="user", admin_api_key="root", enable_metrics=True)) as (client, _):
        routes = {
            (route.method, route.resource.canonical)
            for route in client.app.router.routes()
            if route.resource is not None
        }
        assert len(routes) > 30
        for method, canonical in sorted(routes):
            path = canonical.replace("{", "x").replace("}", "")
            response = await client.request("GET" if method == "*" else method, path)
            assert (response.status == 401) is (canonical not in OPEN_ROUTES), (method, canonical, response.status)


async def test_an_encoded_path_needs_the_key_of_its_route() -> None:
    async with serving(FakeEngine(api_key="user", admin_api_key="root")) as (client, _):
        headers = {"Authorization": "Bearer user"}
        assert (await client.post("/flush%5Fcache", headers=headers)).status == 401
        assert (await client.post("/flush_cache?timeout=1", headers={"Authorization": "Bearer root"})).status == 200


def test_keys_of_any_kind() -> None:
    assert is_key("a", ["b", "a"])
    assert not is_key("", [""])
    assert not is_key("ü\udcff", ["u"])
    assert presented_key({"Authorization": "bearer  k "}) == "k"
    assert presented_key({"x-api-key": "k"}) == "k"
    assert presented_key({"Authorization": "Basic k"}) == ""


def test_tenant_keys_open_no_operator_route() -> None:
    assert may_pass("POST", "/generate", "t", None, None, ["t"])
    assert not may_pass("POST", "/generate", "", None, None, ["t"])
    assert not may_pass("POST", "/flush_cache", "t", None, None, ["t"])
    assert not may_pass("POST", "/flush_cache", "t", "user", None, ["t"])
    assert may_pass("POST", "/flush_cache", "user", "user", None, ["t"])


def test_who_calls() -> None:
    declared = Tenants({"gold": {"weight": 4, "api_key": "g"}, "silver": 2})
    gold, silver = Tenant("gold", 4.0), Tenant("silver", 2.0)
    assert declared.of_call({"Authorization": "Bearer g", "x-tenant": "silver"}) == gold
    assert declared.of_call({"x-tenant": "silver"}) == silver
    # Neither a tenant with a key nor an invented one can be named.
    assert declared.of_call({"x-tenant": "gold"}) == declared.of_call({"x-tenant": "bronze"}) == Tenant()
    assert Tenants(None).of_call({"x-tenant": "anyone"}) == Tenant("anyone")


@pytest.mark.parametrize("value", [0, -1, True, "2", float("nan"), {"weight": 0}, {"api_key": " "}, {"wieght": 1}])
def test_wrong_tenants(value: object) -> None:
    with pytest.raises(StartupError, match="--tenants"):
        Tenants({"a": value})


async def test_requests_beyond_the_limit_are_told_to_come_back() -> None:
    engine = FakeEngine(max_concurrent_requests=1)
    engine.gate = asyncio.Event()
    async with serving(engine) as (client, context):
        first = asyncio.create_task(client.post("/generate", json={"input_ids": [1]}))
        while not context.requests_in_flight:
            await asyncio.sleep(0)
        second = await client.post("/generate", data=b"not even JSON")
        assert (second.status, second.headers["Retry-After"]) == (503, "1")
        engine.gate.set()
        assert (await first).status == 200
        assert (await client.post("/generate", json={"input_ids": [1]})).status == 200


async def test_a_full_queue_says_when_to_come_back() -> None:
    engine = FakeEngine(lambda request: [RequestError("The request queue is full.", status=429)])
    async with serving(engine) as (client, _):
        for path, body in (("/generate", {"input_ids": [1]}), ("/v1/completions", {"prompt": [1], "stream": True})):
            response = await client.post(path, json=body)
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
        wrong = await client.post("/generate", json={})
        assert (wrong.status, "Retry-After" in wrong.headers) == (400, False)


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    words = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={name}"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*words.split(), *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


async def shown_certificate(port: int) -> bytes:
    """The certificate that a new connection gets, as DER."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    shown = tls.getpeercert(binary_form=True)
    writer.close()
    assert shown is not None
    return shown


async def test_certificates_are_exchanged_while_serving(tmp_path: Path) -> None:
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    certificate, key = tmp_path / "tls.pem", tmp_path / "tls.key"
    certificate.write_bytes(first[0].read_bytes())
    key.write_bytes(first[1].read_bytes())
    tls = Certificates.of(ServerConfig(model_path="x", ssl_certfile=str(certificate), ssl_keyfile=str(key)))
    assert tls is not None
    runner = web.AppRunner(web.Application())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.context).start()
        port = runner.addresses[0][1]
        assert await shown_certificate(port) == ssl.PEM_cert_to_DER_cert(first[0].read_text())
        certificate.write_text("half a file")
        assert not tls.reload()
        assert await shown_certificate(port) == ssl.PEM_cert_to_DER_cert(first[0].read_text())
        certificate.write_bytes(second[0].read_bytes())
        key.write_bytes(second[1].read_bytes())
        assert tls.reload()
        assert await shown_certificate(port) == ssl.PEM_cert_to_DER_cert(second[0].read_text())
    finally:
        await runner.cleanup()


async def is_trusted(port: int, shown: tuple[Path, Path] | None) -> bool:
    """Whether a new connection that shows this certificate gets an answer."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if shown is not None:
        context.load_cert_chain(*shown)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return (await reader.readline()).startswith(b"HTTP/1.1 ")
        finally:
            writer.close()
    except (ConnectionError, ssl.SSLError):
        return False


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_authority_that_is_removed_is_no_longer_trusted(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    own, old, new = (make_certificate(tmp_path, name) for name in ("own", "old", "new"))
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(old[0].read_bytes())
    options = {"ssl_certfile": str(own[0]), "ssl_keyfile": str(own[1]), "ssl_ca_certs": str(authorities)}
    tls = Certificates.of(ServerConfig(model_path="x", **options))
    assert tls is not None

    async def exchange() -> None:
        runner = web.AppRunner(web.Application())
        await runner.setup()
        secure = SecurePort(runner, tls, backlog=16)
        try:
            await secure.start("127.0.0.1", 0, reuse_port=None)
            port = runner.addresses[0][1]
            assert [await is_trusted(port, shown) for shown in (old, new, None)] == [True, False, True]
            authorities.write_bytes(new[0].read_bytes())
            for _ in range(2):  # the second takes over from a successor
                assert tls.reload()
                await asyncio.gather(*secure._renewing)
            assert runner.addresses == [("127.0.0.1", port)]
            assert [await is_trusted(port, shown) for shown in (old, new, None)] == [False, True, True]
            authorities.write_text("half a file")
            assert not tls.reload()
            assert await is_trusted(port, new)
            await secure.stop()
            assert not await is_trusted(port, new)
        finally:
            await runner.cleanup()

    with asyncio.Runner(loop_factory=new_loop) as loop:
        loop.run(exchange())


@pytest.mark.parametrize(
    "options",
    [{"ssl_certfile": "a"}, {"ssl_keyfile": "a"}, {"ssl_ca_certs": "a"}, {"enable_ssl_refresh": True}],
)
def test_incomplete_tls_options(options: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="both --ssl-certfile and --ssl-keyfile"):
        Certificates.of(ServerConfig(model_path="x", **options))


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    config = ServerConfig(model_path="x", ssl_certfile=str(first[0]), ssl_keyfile=str(second[1]))
    with pytest.raises(StartupError, match="cannot be used together"):
        Certificates.of(config)
    missing = ServerConfig(model_path="x", ssl_certfile=str(tmp_path / "no"), ssl_keyfile=str(first[1]))
    with pytest.raises(StartupError, match="--ssl-certfile: no such file"):
        Certificates.of(missing)
