"""Prompts of vectors over HTTP: with the embeddings of tokens, the outputs are those of the tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer

from sglang_lite.config import ServerConfig
from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.server.app import make_app
from sglang_lite.server.context import Phase, ServerContext
from sglang_lite.server.prompt_embeddings import read_embeddings
from sglang_lite.types import RequestError
from tests.support.in_process_engine import InProcessEngine, write_character_tokenizer
from tests.support.model_library import Example, Library
from tests.support.tiny_checkpoints import COMMON

SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
FAMILIES = ["llama", "qwen3_moe", "gemma3", "deepseek_v2", "qwen3_next", "gpt_oss"]


def vectors(example: Example, prompt: list[int]) -> list[list[float]]:
    """What transformers' embedding makes of a prompt."""
    with torch.no_grad():
        rows: list[list[float]] = example.oracle.get_input_embeddings()(torch.tensor(prompt)).tolist()
    return rows


@asynccontextmanager
async def serving(example: Example, **options: Any) -> AsyncIterator[tuple[TestClient[Any, Any], InProcessEngine]]:
    write_character_tokenizer(example.directory, COMMON["vocab_size"])
    settings = {"page_size": 4, "chunked_prefill_size": 16, "max_total_tokens": 512, "max_running_requests": 4}
    engine = InProcessEngine(example.directory, **settings | options)
    try:
        context = ServerContext(engine)
        context.phase = Phase.READY
        async with TestClient(TestServer(make_app(context))) as client:
            yield client, engine
    finally:
        engine.close()


async def generate(client: TestClient[Any, Any], status: int = 200, **body: Any) -> Any:
    async with client.post("/generate", json={"sampling_params": SAMPLING, **body}) as response:
        reply = await response.json()
        assert response.status == status, reply
        return reply


@pytest.mark.parametrize("family", FAMILIES)
async def test_vectors_of_tokens_generate_as_the_tokens(library: Library, family: str) -> None:
    """Over chunks and pages, in one batch with prompts of tokens."""
    example = library.example(family)
    prompts = [example.token_ids[-37:], example.token_ids[:6], example.token_ids[10:31]]
    async with serving(example, disable_radix_cache=True) as (client, _):
        expected = [await generate(client, input_ids=prompt, return_logprob=True) for prompt in prompts]
        given = [
            {"input_embeds": vectors(example, prompts[0])},
            {"input_ids": prompts[1]},
            {"input_embeds": vectors(example, prompts[2])},
        ]
        found = await asyncio.gather(*(generate(client, **prompt, return_logprob=True) for prompt in given))
        batch = await generate(client, input_embeds=[vectors(example, prompt) for prompt in prompts])
    for one, other, third in zip(expected, found, batch, strict=True):
        assert one["output_ids"] == other["output_ids"] == third["output_ids"]
        assert one["meta_info"]["prompt_tokens"] == other["meta_info"]["prompt_tokens"]
        scores = [[entry[0] for entry in item["meta_info"]["output_token_logprobs"]] for item in (one, other)]
        np.testing.assert_allclose(scores[0], scores[1], atol=1e-3)


async def test_vectors_are_the_input_and_nothing_else_is(library: Library) -> None:
    """Vectors between those of two tokens generate what transformers generates for them."""
    example = library.example("qwen3")
    mixed = np.array(vectors(example, example.token_ids[:9])) * 0.5 + np.array(
        vectors(example, example.token_ids[9:18])
    )
    values = torch.tensor(mixed.astype(np.float32))
    with torch.no_grad():
        logits = example.oracle(inputs_embeds=values[None]).logits[0, -1]
    scores = torch.log_softmax(logits, dim=-1)
    async with serving(example) as (client, _):
        reply = await generate(client, input_embeds=values.tolist(), return_logprob=True, top_logprobs_num=5)
    meta = reply["meta_info"]
    assert reply["output_ids"][0] == int(logits.argmax())
    found = {entry[1]: entry[0] for entry in meta["output_top_logprobs"][0]}
    for token, score in found.items():
        assert abs(score - float(scores[token])) < 1e-3


async def test_preempted_prompts_are_computed_again(library: Library) -> None:
    example = library.example("llama")
    prompts = [example.token_ids[start : start + 20] for start in (0, 9, 18, 27)]
    long = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    async with serving(example) as (client, _):
        expected = [await generate(client, input_ids=prompt, sampling_params=long) for prompt in prompts]
    async with serving(example, max_total_tokens=144, disable_radix_cache=True) as (client, engine):
        found = await asyncio.gather(
            *(generate(client, input_embeds=vectors(example, prompt), sampling_params=long) for prompt in prompts)
        )
        engine._core._scheduler.audit()
    assert [one["output_ids"] for one in found] == [one["output_ids"] for one in expected]
    assert sum(one["meta_info"]["num_retractions"] for one in found) > 0


async def test_no_request_finds_the_vectors_of_another(library: Library) -> None:
    example = library.example("llama")
    first, second = example.token_ids[:20], example.token_ids[20:40]
    async with serving(example) as (client, engine):
        expected = [(await generate(client, input_ids=ids))["output_ids"] for ids in (first, second, [0] * 20)]
        for prompt, answer in ((first, expected[0]), (second, expected[1]), (second, expected[1])):
            reply = await generate(client, input_embeds=vectors(example, prompt))
            assert (reply["output_ids"], reply["meta_info"]["cached_tokens"]) == (answer, 0)
        assert (await generate(client, input_ids=[0] * 20))["output_ids"] == expected[2]
        engine._core._scheduler.audit()


async def test_choices_share_the_vectors_of_their_prompt(library: Library) -> None:
    example = library.example("llama")
    prompt = example.token_ids[:20]
    body = {"sampling_params": {**SAMPLING, "n": 3}, "return_prompt_token_ids": True}
    async with serving(example) as (client, _):
        expected = (await generate(client, input_ids=prompt))["output_ids"]
        replies = await generate(client, input_embeds=vectors(example, prompt), **body)
    assert [reply["output_ids"] for reply in replies] == [expected] * 3
    assert [reply["prompt_token_ids"] for reply in replies] == [[]] * 3


async def test_streams_stops_and_grammars_work_on_vectors(library: Library) -> None:
    example = library.example("llama")
    prompt = vectors(example, example.token_ids[:20])
    async with serving(example) as (client, _):
        whole = await generate(client, input_embeds=prompt)
        stop = whole["text"][3:5]
        async with client.post(
            "/generate",
            json={"input_embeds": prompt, "stream": True, "sampling_params": {**SAMPLING, "stop": stop}},
        ) as response:
            blocks = [block for block in (await response.read()).split(b"\n\n") if block.strip()]
    last = json.loads(blocks[-2].removeprefix(b"data: "))
    assert last["text"] == whole["text"][: whole["text"].index(stop)]


async def test_hidden_states_of_vectors_are_those_of_the_tokens(library: Library) -> None:
    example = library.example("llama")
    prompt = example.token_ids[:20]
    async with serving(example, enable_return_hidden_states=True) as (client, _):
        expected = await generate(client, input_ids=prompt, return_hidden_states=True)
        found = await generate(client, input_embeds=vectors(example, prompt), return_hidden_states=True)
    for one, other in zip(expected["meta_info"]["hidden_states"], found["meta_info"]["hidden_states"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)


ROW = [0.5] * 64


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input_embeds": []}, "input_embeds cannot be empty"),
        ({"input_embeds": [[]]}, "hidden size is 64"),
        ({"input_embeds": [ROW, ROW[:63]]}, "input_embeds[1] has 63 numbers"),
        ({"input_embeds": [[ROW], [ROW[:5]]]}, "input_embeds[1][0] has 5 numbers"),
        ({"input_embeds": [[ROW], []]}, "input_embeds[1]"),
        ({"input_embeds": [[ROW], ROW]}, "input_embeds[1][0]"),
        ({"input_embeds": ROW}, "input_embeds[0]"),
        ({"input_embeds": "x"}, "input_embeds"),
        ({"input_embeds": [["a"] * 64]}, "input_embeds[0]"),
        ({"input_embeds": [[True] * 64]}, "boolean"),
        ({"input_embeds": [[None] * 64]}, "input_embeds[0]"),
        ({"input_embeds": [ROW, [*ROW[:63], float("nan")]]}, "input_embeds[1][63] must be a finite"),
        ({"input_embeds": [[*ROW[:63], 1e39]]}, "input_embeds[0][63]"),
        ({"input_embeds": [[*ROW[:63], 10**400]]}, "input_embeds[0][63]"),
        ({"input_embeds": [ROW] * 300}, "context length"),
        ({"input_embeds": [ROW], "text": "x"}, "both set"),
        ({"input_embeds": [ROW], "input_ids": [1]}, "both set"),
        ({"input_embeds": [ROW], "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        ({"input_embeds": [ROW], "session_params": {"id": "s"}}, "session_params"),
    ],
)
async def test_wrong_vectors_are_refused_by_name(library: Library, fields: dict[str, Any], named: str) -> None:
    example = library.example("llama")
    async with serving(example) as (client, _):
        async with client.post("/generate", data=json.dumps(fields)) as response:
            text = await response.text()
        assert response.status == 400
        assert named in text
        reply = await generate(client, input_embeds=[ROW, ROW])
        assert len(reply["output_ids"]) == 12


async def test_numbers_are_bounded(library: Library) -> None:
    example = library.example("llama")
    rows = LIMITS.embedding_values // 64 + 1
    async with serving(example) as (client, _):
        reply = await generate(client, 400, input_embeds=[[0] * 64] * rows)
    assert "over the limit" in str(reply)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tp_size": 2}, "--tp-size"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"speculative_algorithm": "NEXTN"}, "NEXTN"),
    ],
)
def test_servers_without_a_way_for_vectors_say_so(options: dict[str, Any], named: str) -> None:
    context: Any = SimpleNamespace(config=ServerConfig(model_path="m", device="cpu", **options))
    with pytest.raises(RequestError, match=named) as caught:
        read_embeddings(context, {"input_embeds": [ROW]})
    assert (caught.value.status, caught.value.field) == (501, "input_embeds")


async def test_guesses_by_n_grams_change_nothing(library: Library) -> None:
    example = library.example("llama")
    prompt = example.token_ids[:8] * 3
    async with serving(example) as (client, _):
        expected = (await generate(client, input_ids=prompt))["output_ids"]
    async with serving(example, speculative_algorithm="NGRAM") as (client, _):
        assert (await generate(client, input_embeds=vectors(example, prompt)))["output_ids"] == expected
