"""The demonstration of a pair, and its dispatcher."""

from __future__ import annotations

import re
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sglang_lite import pd_demo
from sglang_lite.cli import main
from tests.support.smoke_model import build_smoke_model


def test_a_chat_through_both_servers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = build_smoke_model(tmp_path / "hi")
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    assert main(["pd-demo", "--model-path", str(model), "--question", "hi", "--max-tokens", "4", "--exit"]) == 0
    shown = capfd.readouterr().out
    assert "Model: world" in shown or "world" in shown
    moved = re.search(r"tcp moved ([\d,]+) bytes of KV in (\d+) pages, [\d.]+ ms", shown)
    assert moved is not None, shown
    assert int(moved[1].replace(",", "")) > 0


async def test_the_dispatcher_sends_one_room_to_both() -> None:
    seen: dict[str, dict[str, object]] = {}

    def server(name: str) -> TestServer:
        async def answer(request: web.Request) -> web.Response:
            seen[name] = await request.json()
            return web.json_response({"from": name}, status=200 if name == "decode" else 500)

        app = web.Application()
        app.router.add_post("/generate", answer)
        return TestServer(app)

    async with server("prefill") as prefill, server("decode") as decode:
        places = pd_demo.Addresses(prefill=prefill.port or 0, decode=decode.port or 0, bootstrap=8998, dispatcher=0)
        async with (
            TestServer(pd_demo.dispatcher(places)) as dispatcher,
            aiohttp.ClientSession() as session,
            session.post(dispatcher.make_url("/generate"), json={"text": "A"}) as reply,
        ):
            assert await reply.json() == {"from": "decode"}
    assert seen["prefill"] == seen["decode"]
    assert seen["decode"]["bootstrap_port"] == 8998
    assert 0 <= int(str(seen["decode"]["bootstrap_room"])) < 1 << 63
