"""Prompts of vectors through the frames between the processes."""

from __future__ import annotations

import asyncio

from tests.support.chain_model import HIDDEN_SIZE
from tests.support.server import LocalServer, greedy


def row(token: int) -> list[int]:
    """The embedding of a token of the chain model."""
    return [int(index == token) for index in range(HIDDEN_SIZE)]


async def test_vectors_reach_the_engine(server: LocalServer) -> None:
    plain = greedy("pA", sampling={"max_new_tokens": 6})
    given = greedy(input_embeds=[row(112), row(65)], sampling={"max_new_tokens": 6}, return_prompt_token_ids=True)
    batch = greedy(input_embeds=[[row(48)], [row(65)] * 3])
    replies = await asyncio.gather(*(server.post("/generate", body) for body in (plain, given, batch, plain)))
    first, second, third, _ = [reply.json() for reply in replies]
    assert first["text"] == second["text"] == "BCDABC"
    assert (second["meta_info"]["prompt_tokens"], second["prompt_token_ids"]) == (2, [])
    assert [item["text"][:9] for item in third] == ["123456789", "BCDABCDAB"]
    assert (await server.load())["num_reqs"] == 0


async def test_other_routes_name_the_field(server: LocalServer) -> None:
    for path, body in (("/v1/completions", {"prompt": "A"}), ("/encode", {"text": "A"})):
        reply = await server.post(path, {**body, "input_embeds": [row(65)]})
        assert reply.status == 400 and "only /generate takes them" in reply.text


async def test_predictions_take_vectors(server: LocalServer) -> None:
    parameters = {"sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    body = {"instances": [{"input_embeds": [row(65)]}], "parameters": parameters}
    assert (await server.post("/vertex_generate", body)).json()["predictions"][0]["text"] == "BCD"
