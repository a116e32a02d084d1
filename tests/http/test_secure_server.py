"""A whole server process behind TLS, with keys, tenants and fair scheduling; what it logs of its requests."""

from __future__ import annotations

import json
import signal
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.server import LocalServer, ServerProcess
from tests.unit.server.test_security import make_certificate

SECRET = "zyzzyva quokka"
TENANTS = {"gold": {"weight": 3, "api_key": "gold-key"}, "silver": 1}


class Client:
    """Calls of a server that trusts one certificate only."""

    def __init__(self, port: int, certificate: Path) -> None:
        self._url = f"https://localhost:{port}"
        self._context = ssl.create_default_context(cafile=str(certificate))

    def call(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {name.replace("_", "-"): headers[name] for name in headers}
        )
        try:
            with urllib.request.urlopen(request, timeout=20, context=self._context) as response:
                return response.status, _decode(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _decode(error.read())

    def wait_ready(self, server: ServerProcess, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if self.call("/health")[0] == 200:
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            assert server.process.poll() is None, server.output
            assert time.monotonic() < deadline, server.output
            time.sleep(0.1)


def _decode(body: bytes) -> Any:
    return json.loads(body) if body.startswith((b"{", b"[")) else body.decode()


def test_tls_keys_tenants_and_silent_logs(chain_model: Path, tmp_path: Path) -> None:
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    certificate, key = tmp_path / "tls.pem", tmp_path / "tls.key"
    certificate.write_bytes(first[0].read_bytes())
    key.write_bytes(first[1].read_bytes())
    options = ["--model-path", str(chain_model), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    options += ["--fair-scheduling", "--tenants", json.dumps(TENANTS), "--admin-api-key", "root-key", "--api-key", "k"]
    with ServerProcess(options, tmp_path / "server.log") as server:
        client = Client(server.port, first[0])
        client.wait_ready(server)
        body = {"text": SECRET, "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
        assert client.call("/generate", body) == (401, {"error": "Unauthorized"})
        status, reply = client.call("/generate", {**body, "explain": True}, Authorization="Bearer gold-key")
        assert (status, reply["meta_info"]["explain"]["completion_tokens"]) == (200, 4)
        assert client.call("/generate", body, Authorization="Bearer k", x_tenant="silver")[0] == 200
        assert client.call("/generate", {**body, "sampling_params": {"top_p": 7}}, x_api_key="k")[0] == 400
        assert client.call("/flush_cache", {}, Authorization="Bearer gold-key")[0] == 401
        status, info = client.call("/server_info", Authorization="Bearer k")
        assert status == 200
        assert not any(secret in json.dumps(info) for secret in ("gold-key", "root-key"))
        certificate.write_bytes(second[0].read_bytes())
        key.write_bytes(second[1].read_bytes())
        server.process.send_signal(signal.SIGHUP)
        Client(server.port, second[0]).wait_ready(server, 10)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit(10) == 0
        assert not any(secret in server.output for secret in (*SECRET.split(), "gold-key", "root-key"))


async def test_openai_replies_explain_themselves_when_asked(server: LocalServer) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True, "n": 2}
    reply = (await server.post("/v1/chat/completions", {**chat, "explain": True})).json()
    assert [one["completion_tokens"] for one in reply["explain"]] == [3, 3]
    assert "explain" not in (await server.post("/v1/chat/completions", chat)).json()
    text = {"prompt": "hi", "max_tokens": 3, "ignore_eos": True, "stream": True, "explain": True}
    events = (await server.post("/v1/completions", text)).events
    assert events[-1] == "[DONE]"
    assert events[-2]["explain"][0]["completion_tokens"] == 3
    assert (await server.post("/v1/completions", {**text, "explain": 1})).status == 400
