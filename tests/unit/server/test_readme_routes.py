"""The table of the README names every route that is served, and no other one."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_lite.server.absent_routes import absent
from sglang_lite.server.app import make_app
from sglang_lite.server.context import ServerContext
from tests.support.fake_engine import FakeEngine

ROOT = Path(__file__).parents[3]
ALIASES = {
    "/get_load": "/v1/loads",
    "/get_loads": "/v1/loads",
    "/get_model_info": "/model_info",
    "/get_server_info": "/server_info",
    "/get_remote_instance_transfer_engine_info": "/remote_instance_transfer_engine_info",
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
    "/rerank": "/v1/rerank",
}
"""Older and second names of one route."""


def test_what_works_is_what_is_routed() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("## What works") : text.index("## Configuration")]
    # The first column says what kind of thing it is, the second what works.
    works = "\n".join(row.split(" | ")[1] for row in table.splitlines() if row.count(" | ") >= 2)
    named = {path.rstrip("/") for path in re.findall(r"`(/[a-z][a-z0-9_./]*)", works)}
    app = make_app(ServerContext(FakeEngine(enable_metrics=True)))
    served: set[str] = set()
    refused: set[str] = set()
    for route in app.router.routes():
        path = "" if route.resource is None else route.resource.canonical
        kind = refused if route.handler is absent else served
        kind.add(path.partition("/{")[0].rstrip("/"))
    assert named <= served | {""}, "named, but not served"
    left = {ALIASES.get(path, path) for path in served} - named
    # The page's own files, and what front processes ask one another.
    left = {path for path in left if path and not path.startswith(("/playground/", "/peer/"))}
    assert left == set(), "served, but not named"
    assert not named & refused
