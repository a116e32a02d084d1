"""The page at ``/``: what is served to whom, and the page itself in a headless browser."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from typing import Any

import pytest

from sglang_lite.server.playground_routes import PATHS
from tests.support.server import LocalServer

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


async def test_a_browser_gets_the_page_and_a_tool_the_greeting(server: LocalServer) -> None:
    page = await server.get("/", headers=HTML)
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "<title>sglang-lite</title>" in page.text
    assert (await server.get("/")).json() == "SGLang is running"


async def test_everything_that_the_page_names_is_served_by_this_server(server: LocalServer) -> None:
    page = (await server.get("/", headers=HTML)).text
    named = {f"/{name}" for name in re.findall(r'(?:src|href)="(?!data:)([^"]+)"', page)}
    for path in sorted(named | set(PATHS)):
        assert not path.startswith(("/http", "//"))
        reply = await server.get(path)
        assert reply.status == 200, path
        if path.endswith(".js"):
            assert reply.headers["Content-Type"].startswith("text/javascript")
            imported = re.findall(r'from "\./([^"]+)"', reply.text)
            assert {f"/playground/{name}" for name in imported} <= set(PATHS)


async def test_nothing_inline_can_run(server: LocalServer) -> None:
    page = await server.get("/", headers=HTML)
    policy = page.headers["Content-Security-Policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son[a-z]+=|style=", page.text)
    for path in PATHS[1:]:
        if path.endswith(".js"):
            assert "innerHTML" not in (await server.get(path)).text


def converse(tab: Any, url: str, expect: Any) -> list[str]:
    """What a person does; returns what the page complained about."""
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.goto(url)
    expect(tab.locator("#model")).to_have_text("chain")
    expect(tab.locator("#state")).to_have_text("serving")
    expect(tab.locator("#pages")).to_have_text(re.compile(r"^\d+ of 65536$"))
    tab.fill("#temperature", "0")
    tab.fill("#prompt", "a")
    tab.press("#prompt", "Enter")
    expect(tab.locator("li.assistant")).to_have_text("é🙂!")
    expect(tab.locator("#send")).to_be_enabled()
    expect(tab.locator("#figures")).to_have_text(re.compile(r"TTFT \d+ ms, [\d.]+ tokens/s, 8 tokens"))
    # A stop string; the template joins the turns.
    tab.fill("#stop_string", "D")
    tab.fill("#prompt", "A")
    tab.click("#send")
    expect(tab.locator("li.assistant").last).to_have_text("BC")
    expect(tab.locator("#send")).to_be_enabled()
    # An error of the server is shown, and the page goes on.
    tab.fill("#top_p", "7")
    tab.fill("#prompt", "A")
    tab.click("#send")
    expect(tab.locator("li.error")).to_contain_text("top_p")
    expect(tab.locator("#send")).to_be_enabled()
    # Text is text, and an answer that goes on and on can be left.
    tab.click("#clear")
    tab.fill("#top_p", "")
    tab.fill("#stop_string", "")
    tab.fill("#max_tokens", "900")
    tab.fill("#prompt", "<img src=x>A")
    tab.click("#send")
    expect(tab.locator("li.user")).to_have_text("<img src=x>A")
    expect(tab.locator("li img")).to_have_count(0)
    expect(tab.locator("li.assistant")).to_contain_text("BCDABCDA")
    return errors


@pytest.fixture(scope="module")
def tab() -> Any:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the optional group `clients`")
    if CHROMIUM is None:
        pytest.skip("needs chromium on the path; .ci/run installs it")
    return playwright


@pytest.mark.timeout(90)
async def test_a_conversation_in_a_browser(server: LocalServer, tab: Any) -> None:
    def browse() -> list[str]:
        with tab.sync_playwright() as playwright:
            # Root, as in a container, has no sandbox of its own.
            options = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*options, "--disable-dev-shm-usage"])
            try:
                return converse(browser.new_page(), server.url + "/", tab.expect)
            finally:
                browser.close()

    errors = await asyncio.to_thread(browse)
    # The refused request is the only thing a browser may log.
    assert [error for error in errors if "400" not in error] == []
    await server.idle()
