"""``best_of``: more sequences are drawn than shown, and the most probable ones are shown."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server import LocalServer


async def complete(server: LocalServer, **fields: Any) -> Any:
    reply = await server.post("/v1/completions", {"prompt": "A", "max_tokens": 1, "seed": 7, **fields})
    assert reply.status == 200, reply.text
    return reply.json()


async def test_the_most_probable_of_many_are_shown(server: LocalServer) -> None:
    """With 40 draws one is the most probable token; a single draw with this seed is the same as the first of them."""
    drawn = await complete(server, n=40, logprobs=0)
    values = sorted((choice["logprobs"]["token_logprobs"][0] for choice in drawn["choices"]), reverse=True)
    best = await complete(server, n=3, best_of=40, logprobs=0)
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2]
    shown = [choice["logprobs"]["token_logprobs"][0] for choice in best["choices"]]
    assert shown == pytest.approx(values[:3], abs=1e-5)
    assert best["usage"]["completion_tokens"] == 40
    plain = await complete(server, best_of=40)
    assert (plain["choices"][0]["text"], plain["choices"][0]["logprobs"]) == ("B", None)


async def test_echo_with_several_prompts(server: LocalServer) -> None:
    body = await complete(server, prompt=["A", "0"], best_of=20, echo=True)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "AB"), (1, "01")]


@pytest.mark.parametrize("fields", [{"best_of": 0}, {"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}])
async def test_bad_best_of(server: LocalServer, fields: dict[str, Any]) -> None:
    reply = await server.post("/v1/completions", {"prompt": "A", **fields})
    assert (reply.status, "best_of" in reply.json()["message"]) == (400, True)
