"""Keys, certificates, cross-origin calls, and one form for every error."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import sys
from pathlib import Path

import aiohttp
import msgspec
import pytest

from sglang_lite.router.access import Access
from sglang_lite.router.context import RouterContext
from sglang_lite.router.options import RouterOptions, checked, parse_options
from sglang_lite.router.tls import WorkerTrust, server_certificates
from sglang_lite.types import StartupError
from tests.router.test_proxy import CHAT, CHAT_PATH, code_of, fixed
from tests.support.null_workers import NullWorker, router_over
from tests.support.server import ROOT, free_port
from tests.unit.server.test_security import make_certificate, shown_certificate

OPERATORS = ("1:ann:admin:root:key", "2:bob:user:bobs-key")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_the_control_plane_has_keys_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    worker = NullWorker()
    options = {"api_key": "client", "control_plane_api_keys": OPERATORS, "control_plane_audit_enabled": True}
    async with router_over(worker, **options) as router:
        for path in ("/workers", "/v1/loads", "/nowhere"):
            for key, status in (("", 401), ("client", 401), ("wrong", 401), ("bobs-key", 403)):
                async with router.session.get(router.url + path, headers=bearer(key)) as response:
                    assert (path, key, response.status) == (path, key, status)
                    assert (response.headers.get("www-authenticate") == "Bearer") is (status == 401)
            async with router.session.get(router.url + path, headers=bearer("root:key")) as response:
                assert response.status == (404 if path == "/nowhere" else 200)
        assert (await router.post("/flush_cache", {}, headers=bearer("client")))[0] == 401
        assert (await router.post("/flush_cache", {}, headers=bearer("root:key")))[0] == 200
        assert worker.seen[-1][1]["authorization"] == "Bearer client", "the operator's key stays here"
        for key, status in (("", 401), ("client", 200), ("bobs-key", 200), ("root:key", 200)):
            assert (await router.post(CHAT_PATH, CHAT, headers=bearer(key)))[0] == status
            assert worker.seen[-1][1]["authorization"] == "Bearer client"
        assert (await router.get("/healthz"))[0] == (await router.get("/metrics"))[0] == 200
    assert "control plane: POST /flush_cache by 1" in caplog.text
    assert "root:key" not in caplog.text


async def test_keys_of_tenants_open_the_data_routes_only() -> None:
    worker = NullWorker()
    tenants = '{"gold": {"weight": 3, "api_key": "gold-key"}, "silver": 1}'
    async with router_over(worker, tenants=tenants) as router:
        assert (await router.post(CHAT_PATH, CHAT))[0] == 401
        assert (await router.post(CHAT_PATH, CHAT, headers={"x-api-key": "gold-key"}))[0] == 200
        assert not {"authorization", "x-api-key"} & worker.seen[-1][1].keys(), "a tenant's key is not for workers"
        assert (await router.get("/workers"))[0] == 401
        async with router.session.get(router.url + "/workers", headers=bearer("gold-key")) as response:
            assert response.status == 401


def test_a_wrong_key_takes_as_many_comparisons_as_a_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    access = Access(RouterOptions(control_plane_api_keys=OPERATORS, api_key="k"), frozenset({"/generate"}))
    calls: list[int] = []
    monkeypatch.setattr(
        "sglang_lite.router.access.hmac.compare_digest", lambda one, other: calls.append(len(one)) or one == other
    )
    counts = []
    for key in ("k", "root:key", "bobs-key", "", "nobody's", "ü\udcff"):
        calls.clear()
        if key in ("k", "root:key", "bobs-key"):
            access.check("POST", "/generate", bearer(key))
        else:
            with pytest.raises(Exception, match="valid API key"):
                access.check("POST", "/generate", bearer(key))
        counts.append(list(calls))
    assert counts == [[32] * 3] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"control_plane_api_keys": ("a:b:admin",)}, "ID:NAME:ROLE:KEY"),
        ({"control_plane_api_keys": ("a:b:king:k",)}, "king"),
        ({"tenants": "[]"}, "--tenants"),
        ({"tenants": '{"a": 0}'}, "above 0"),
        ({"tls_cert_path": "/nowhere.pem"}, "go together"),
        ({"tls_cert_path": "/nowhere.pem", "tls_key_path": "/nowhere.key"}, "no such file"),
        ({"client_key_path": "/nowhere.key"}, "go together"),
        ({"ca_cert_paths": ("/nowhere.pem",)}, "no such file"),
    ],
)
def test_wrong_declarations_end_the_start(options: dict[str, object], message: str) -> None:
    made = checked(RouterOptions(**options))  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=message) as caught:
        RouterContext(made)
        server_certificates(made)
    assert "a:b:admin" not in str(caught.value), "a declaration holds a secret"


async def test_every_error_has_the_envelope() -> None:
    worker = NullWorker()
    async with router_over(worker, max_payload_size=200) as router:
        status, headers, body = await router.get("/no/such/path")
        assert (status, code_of(body), headers["x-router-error-code"]) == (404, "not_found", "not_found")
        assert headers["x-request-id"].startswith("req-") and headers["content-type"].startswith("application/json")
        status, headers, body = await router.get(CHAT_PATH)
        assert (status, code_of(body), headers["allow"]) == (405, "method_not_allowed", "POST")
        big = {"prompt": "y" * 300}
        for path in (CHAT_PATH, "/v1/tokenize", "/flush_cache", "/workers", "/parse/reasoning"):
            status, _, body = await router.post(path, big)
            assert (path, status, code_of(body)) == (path, 413, "payload_too_large")
        for path in ("/v1/tokenize", "/flush_cache", "/workers", "/tokenize"):
            status, _, body = await router.post(path, b"[")
            assert (path, status, code_of(body)) == (path, 400, "bad_request")
        assert worker.seen == []


async def test_bodies_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_lite.router.bodies.BODY_SECONDS", 0.05)
    async with router_over(NullWorker()) as router, asyncio.timeout(20):
        for path in ("/generate", "/v1/tokenize", "/flush_cache"):
            for rest in (b"transfer-encoding: chunked\r\n\r\n5\r\nabc", b"content-length: 9\r\n\r\nabc"):
                reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
                writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\n".encode() + rest)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 408")
                assert code_of(await reader.readuntil(b"}}")) == "request_timeout"
                writer.close()


async def test_ids_that_could_not_be_sent_on_are_replaced() -> None:
    worker = NullWorker()
    async with router_over(worker, request_id_headers=("x-trace", "x-request-id")) as router:
        for given in ("x" * 300, "ünïcode", "a b"):
            _, headers, _ = await router.post("/generate", {}, headers={"x-request-id": given})
            assert headers["x-request-id"].startswith("gnt-")
        _, headers, _ = await router.post("/generate", {}, headers={"x-request-id": "second", "x-trace": "first"})
        assert headers["x-request-id"] == worker.seen[-1][1]["x-request-id"] == "first"


async def test_cross_origin_calls() -> None:
    asking = {"origin": "https://page", "access-control-request-method": "POST"}
    async with router_over(NullWorker(), cors_allowed_origins=("https://page",), api_key="k") as router:
        async with router.session.options(router.url + CHAT_PATH, headers=asking) as response:
            assert (response.status, response.headers["access-control-allow-origin"]) == (204, "https://page")
            assert "POST" in response.headers["access-control-allow-methods"]
        async with router.session.options(
            router.url + CHAT_PATH, headers={**asking, "origin": "https://other"}
        ) as response:
            assert not [name for name in response.headers if name.lower().startswith("access-control")]
        status, headers, _ = await router.post(CHAT_PATH, CHAT, headers={"origin": "https://page"})
        assert (status, headers["access-control-allow-origin"], headers["vary"]) == (401, "https://page", "Origin")
        _, headers, _ = await router.post(CHAT_PATH, CHAT, headers={"origin": "https://other", **bearer("k")})
        assert "access-control-allow-origin" not in headers
    async with router_over(NullWorker()) as router:
        _, headers, _ = await router.post(CHAT_PATH, CHAT, headers={"origin": "https://page"})
        assert "access-control-allow-origin" not in headers
        async with router.session.options(router.url + CHAT_PATH, headers=asking) as response:
            assert response.status == 405


async def test_small_work_is_passed_to_a_worker() -> None:
    worker = NullWorker()
    worker.answer = fixed(200, b'{"tokens":[1,2],"count":2,"max_model_len":9,"text":"ab"}')
    async with router_over(worker) as router:

        async def ask(path: str, body: object) -> tuple[int, object, tuple[str, object]]:
            status, _, answer = await router.post(path, body)
            path, _, sent = worker.seen[-1]
            return status, msgspec.json.decode(answer), (path, msgspec.json.decode(sent))

        question = {"model": "m", "prompt": "ab"}
        reply = {"model": "m", "tokens": [1, 2], "count": 2}
        assert await ask("/v1/tokenize", question) == (200, reply, ("/v1/tokenize", question))
        question = {"model": "m", "tokens": [1, 2]}
        sent = ("/v1/detokenize", {**question, "skip_special_tokens": False})
        assert await ask("/v1/detokenize", question) == (200, {"model": "m", "text": "ab"}, sent)
        for path, worker_path in (
            ("/parse/function_call", "/parse_function_call"),
            ("/parse/reasoning", "/separate_reasoning"),
            ("/tokenize", "/tokenize"),
            ("/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ):
            status, answer, sent = await ask(path, {"text": "x"})
            assert (status, answer, sent) == (
                200,
                msgspec.json.decode(b'{"tokens":[1,2],"count":2,"max_model_len":9,"text":"ab"}'),
                (worker_path, {"text": "x"}),
            )
        status, _, body = await router.post("/v1/tokenize", {"prompt": "a", "odd": 1})
        assert (status, code_of(body)) == (422, "unknown_field")
        status, _, body = await router.post("/v1/detokenize", {"tokens": "a"})
        assert (status, code_of(body)) == (400, "bad_request")
        worker.answer = fixed(418, b"tea", "text/plain")
        assert [(await router.post(path, {"prompt": "a"}))[::2] for path in ("/v1/tokenize",)] == [(418, b"tea")]
        worker.answer = fixed(200, b'{"other":1}')
        assert code_of((await router.post("/v1/tokenize", {"prompt": "a"}))[2]) == "upstream_status"


async def test_small_work_goes_around_a_worker_that_is_gone() -> None:
    first, second = NullWorker(), NullWorker()
    second.answer = fixed(200, b'{"text":"ab"}')
    async with router_over(first, second) as router:
        router.context.registry.workers[second.url].running = 1
        gone = router.context.registry.workers[first.url]
        await first.server.close()
        for _ in range(3):
            assert (await router.post("/v1/detokenize", {"tokens": [1]}))[0] == 200
        assert gone.breaker.state.name == "OPEN"
        assert router.context.leases.total == 0


async def test_workers_are_checked_and_shown_a_certificate(tmp_path: Path) -> None:
    server, client = make_certificate(tmp_path, "server"), make_certificate(tmp_path, "client")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(client[0]))
    context.load_cert_chain(*server)
    context.verify_mode = ssl.CERT_REQUIRED
    worker = NullWorker()
    await worker.server.start_server(ssl=context)
    files = {"client_cert_path": str(client[0]), "client_key_path": str(client[1])}
    try:
        for options, is_taken in ((files, False), ({"ca_cert_paths": (str(server[0]),)}, False), (None, True)):
            given = {"ca_cert_paths": (str(server[0]),), **files} if options is None else options
            async with router_over(**given, worker_startup_check_interval=0.01) as router:  # type: ignore[arg-type]
                assert (await router.post("/workers", {"url": worker.url}))[0] == 202
                if is_taken:
                    await router.registered(1)
                    assert (await router.post(CHAT_PATH, CHAT))[0] == 200
                else:
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.2):
                            await router.registered(1)
    finally:
        await worker.server.close()


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    one, other = make_certificate(tmp_path, "one"), make_certificate(tmp_path, "other")
    with pytest.raises(StartupError, match="cannot be used"):
        WorkerTrust((), (one[0], other[1])).context()
    with pytest.raises(StartupError, match="cannot be used"):
        server_certificates(RouterOptions(tls_cert_path=str(one[0]), tls_key_path=str(other[1])))
    assert WorkerTrust().context() is True


async def test_the_process_serves_tls_and_takes_new_certificates(tmp_path: Path) -> None:
    """Errors of the protocol come in the envelope as well."""
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    certificate, key = tmp_path / "tls.pem", tmp_path / "tls.key"
    certificate.write_bytes(first[0].read_bytes())
    key.write_bytes(first[1].read_bytes())
    port = free_port()
    words = ["router", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--tls-cert-path", str(certificate), "--tls-key-path", str(key)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sglang_lite", *words, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        async with asyncio.timeout(30):
            while True:
                try:
                    assert await shown_certificate(port) == ssl.PEM_cert_to_DER_cert(first[0].read_text())
                    break
                except ConnectionError:
                    await asyncio.sleep(0.05)
            context = ssl.create_default_context(cafile=str(first[0]))
            url = f"https://localhost:{port}/healthz"
            async with aiohttp.ClientSession() as session, session.get(url, ssl=context) as response:
                assert response.status == 200
            reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
            writer.write(b"GET / NONSENSE\r\n\r\n")
            answer = await reader.read()
            writer.close()
            assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
            assert code_of(answer.partition(b"\r\n\r\n")[2]) == "bad_request"
            certificate.write_bytes(second[0].read_bytes())
            key.write_bytes(second[1].read_bytes())
            process.send_signal(signal.SIGHUP)
            while await shown_certificate(port) != ssl.PEM_cert_to_DER_cert(second[0].read_text()):
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_flags() -> None:
    options = parse_options(
        ["--control-plane-api-keys", *OPERATORS, "--cors-allowed-origins", "*", "--ca-cert-paths", "a"]
    )
    assert options.control_plane_api_keys == OPERATORS
    assert (options.cors_allowed_origins, options.ca_cert_paths) == (("*",), ("a",))
