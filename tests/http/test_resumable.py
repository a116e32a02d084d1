"""Streams that go on where another server stopped: marks, ``resume_from``, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from sglang_lite.server.resumable import HEADER
from tests.support.server import LocalServer, local_server

ASKED = {HEADER: "1"}
MESSAGES = [{"role": "user", "content": "A"}]
SAMPLED = {"temperature": 1.5, "seed": 7, "frequency_penalty": 0.8, "min_tokens": 3}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "A", "sampling_params": {"temperature": 0, "max_new_tokens": 12}}),
    (
        "/generate",
        {
            "text": "A",
            "sampling_params": {"temperature": 1.5, "sampling_seed": 3, "max_new_tokens": 12, "ignore_eos": True},
        },
    ),
    ("/v1/completions", {"prompt": "A", "max_tokens": 12, "ignore_eos": True, **SAMPLED}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 12, "temperature": 0, "stop": ["!"], "echo": True}),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 12,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **SAMPLED,
        },
    ),
    ("/v1/completions", {"prompt": "A", "max_tokens": 12, "temperature": 1, "seed": 5, "regex": "[A-Z]{3}[a-d]{9}"}),
]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def servers(chain_model: Path) -> AsyncIterator[tuple[LocalServer, LocalServer]]:
    async with (
        local_server(chain_model, grammar_backend="xgrammar") as one,
        local_server(chain_model, grammar_backend="xgrammar") as other,
    ):
        yield one, other


def atoms(body: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    """(events, their mark) of a marked stream."""
    found, events = [], b""
    for block in body.split(b"\n\n")[:-1]:
        if block.startswith(b":sgl "):
            found.append((events, msgspec.json.decode(block.removeprefix(b":sgl "))))
            events = b""
        else:
            events += block + b"\n\n"
    assert not events, "events without a mark"
    return found


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_the_rest_is_what_it_would_have_been(
    servers: tuple[LocalServer, LocalServer], path: str, body: dict[str, Any]
) -> None:
    """Cut behind every mark, each stream goes on on the other server with the very bytes of the first."""
    one, other = servers
    body = {**body, "stream": True}
    reply = await one.post(path, body, headers=ASKED)
    assert reply.status == 200 and reply.headers[HEADER] == "1", reply.text
    whole = atoms(reply.body)
    assert len(whole) >= 2
    first = whole[0][1]
    for cut in range(1, len(whole)):
        sent = [portion for _, mark in whole[:cut] for portion in mark["sent"]]
        resume = {"sent": sent, "id": first["id"], "created": first["created"]}
        rest = await other.post(path, {**body, "resume_from": resume}, headers=ASKED)
        assert rest.status == 200, rest.text
        assert joined(atoms(rest.body)) == joined(whole[cut:])


def joined(found: list[tuple[bytes, dict[str, Any]]]) -> tuple[list[int], str, list[Any], set[Any]]:
    """Tokens, new text, the events without text, and ids and times: a busy machine may join portions."""
    tokens = [token for _, mark in found for portion in mark["sent"] for token in portion]
    text, others, names = "", [], set()
    for block in b"".join(events for events, _ in found).split(b"\n\n")[:-1]:
        data = block.removeprefix(b"data: ")
        event = data if data == b"[DONE]" else without_clocks(msgspec.json.decode(data))
        if data == b"[DONE]":
            others.append(event)
            continue
        names.add((event.get("id"), event.get("created"), event.get("meta_info", {}).get("id")))
        choice = (event.get("choices") or [{}])[0]
        text += choice.pop("text", None) or choice.get("delta", {}).pop("content", None) or ""
        ends = choice.get("finish_reason") or event.get("meta_info", {}).get("finish_reason")
        if ends or not event.get("choices", True):
            others.append(event)
    return tokens, text, others, names


def without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: without_clocks(item)
            for key, item in value.items()
            if key not in ("e2e_latency", "response_sent_to_client_ts", "cached_tokens", "prompt_tokens_details")
        }
    return [without_clocks(item) for item in value] if isinstance(value, list) else value


async def test_nothing_is_marked_unless_asked_for(servers: tuple[LocalServer, LocalServer]) -> None:
    path, body = REQUESTS[0]
    reply = await servers[0].post(path, {**body, "stream": True})
    assert HEADER not in reply.headers and b":sgl" not in reply.body
    reply = await servers[0].post(path, body, headers=ASKED)
    assert HEADER not in reply.headers and reply.json()["text"] == "BCDABCDABCDA"


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"logprobs": 1},
        {"prompt": ["A", "A"]},
        {"stream": False},
    ],
)
async def test_streams_that_stay_where_they_are(servers: tuple[LocalServer, LocalServer], more: dict[str, Any]) -> None:
    """They are served without marks, and nobody can go on with them."""
    body = {"prompt": "A", "max_tokens": 4, "temperature": 0, "stream": True, **more}
    reply = await servers[0].post("/v1/completions", body, headers=ASKED)
    assert reply.status == 200 and HEADER not in reply.headers and b":sgl" not in reply.body
    resume = {"sent": [[66]], "id": "cmpl-1", "created": 1}
    reply = await servers[0].post("/v1/completions", {**body, "resume_from": resume}, headers=ASKED)
    assert reply.status == 400 and "resume_from" in reply.text


@pytest.mark.parametrize(
    ("headers", "resume", "more"),
    [
        ({}, {"sent": [[66]], "id": "x", "created": 1}, {}),
        (ASKED, {"sent": [[66]], "id": "x"}, {}),
        (ASKED, {"sent": [[-1]], "id": "x", "created": 1}, {}),
        (ASKED, {"sent": [[9999]], "id": "x", "created": 1}, {}),
        (ASKED, {"sent": [[66, 67, 68, 65]], "id": "x", "created": 1}, {}),
        (ASKED, {"sent": [[66, 67]], "id": "x", "created": 1}, {"stop": ["C"]}),
        (ASKED, {"sent": [[66, 67]], "id": "x", "created": 1}, {"regex": "[a-z]+"}),
    ],
)
async def test_what_cannot_be_resumed(
    servers: tuple[LocalServer, LocalServer], headers: dict[str, str], resume: Any, more: dict[str, Any]
) -> None:
    body = {"prompt": "A", "max_tokens": 4, "temperature": 0, "stream": True, "resume_from": resume, **more}
    reply = await servers[0].post("/v1/completions", body, headers=headers)
    assert reply.status in (400, 500) and ("resume_from" in reply.text), reply.text
    assert (await servers[0].idle())["num_reqs"] == 0
