"""Every family over HTTP from its tiny checkpoint: the tokens and log-probabilities of transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer

from sglang_lite import startup
from sglang_lite.config import ServerConfig
from sglang_lite.models.description import read_description
from sglang_lite.server.app import make_app
from sglang_lite.server.context import Phase, ServerContext
from sglang_lite.types import StartupError
from tests.support.greedy_check import assert_greedy
from tests.support.in_process_engine import InProcessEngine, tokens_of, write_character_tokenizer
from tests.support.model_library import Example, Library, full_pass
from tests.support.server import LocalServer, local_server
from tests.support.tiny_checkpoints import CASES, COMMON

NUM_GENERATED = 12
PROMPT_LENGTHS = (21, 7)
SCORED_PROMPT = 64

Client = TestClient[Any, Any]


@asynccontextmanager
async def serving(example: Example) -> AsyncIterator[Client]:
    """A server over a case's checkpoint. Pages and chunks are small, so that prompts cross both."""
    write_character_tokenizer(example.directory, COMMON["vocab_size"])
    engine = InProcessEngine(
        example.directory,
        page_size=4,
        chunked_prefill_size=16,
        max_total_tokens=512,
        max_running_requests=4,
        enable_cache_report=True,
    )
    try:
        context = ServerContext(engine)
        context.phase = Phase.READY
        async with TestClient(TestServer(make_app(context))) as client:
            yield client
    finally:
        engine.close()


async def complete(client: Client, prompt: list[int]) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": NUM_GENERATED, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    reply: dict[str, Any] = await response.json()
    assert response.status == 200, reply
    return reply


@pytest.mark.parametrize("case", list(CASES))
async def test_completions_are_the_greedy_tokens_of_transformers(library: Library, case: str) -> None:
    """Two prompts in one batch, then one of them again, from the cache where the model can use it (C125)."""
    example = library.example(case)
    prompts = [example.token_ids[-length:] for length in PROMPT_LENGTHS]
    async with serving(example) as client:
        replies = await asyncio.gather(*(complete(client, prompt) for prompt in prompts))
        replies.append(await complete(client, prompts[0]))
    keeps_state = read_description(example.directory).recurrent is not None
    assert replies[2]["usage"]["prompt_tokens_details"]["cached_tokens"] == (0 if keeps_state else 20)
    texts = [reply["choices"][0]["text"] for reply in replies]
    assert texts[2] == texts[0]
    for prompt, text in zip(prompts, texts[:2], strict=True):
        assert len(text) == NUM_GENERATED
        assert_greedy(example.oracle, prompt, tokens_of(text))
    assert {reply["usage"]["completion_tokens"] for reply in replies} == {NUM_GENERATED}


@pytest.mark.parametrize("case", list(CASES))
async def test_c951_input_logprobs_equal_transformers(library: Library, case: str) -> None:
    example = library.example(case)
    prompt = (example.token_ids * 2)[:SCORED_PROMPT]
    async with serving(example) as client:
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        response = await client.post("/generate", json=body)
        scored = (await response.json())["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in scored] == prompt
    expected = full_pass(example.oracle, prompt).log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])
    actual = torch.tensor([entry[0] for entry in scored[1:]])
    assert (actual - expected.squeeze(1)).abs().max().item() <= 1e-3


@pytest.mark.parametrize("case", ["gpt_oss", "deepseek_v3_yarn", "qwen3_next"])
async def test_a_core_process_gives_the_same_tokens(library: Library, case: str) -> None:
    """One family of each kind of memory: keys and values, latent rows, recurrent state."""
    example = library.example(case)
    write_character_tokenizer(example.directory, COMMON["vocab_size"])
    prompt = example.token_ids[:20]
    async with local_server(example.directory, max_total_tokens=1024, max_running_requests=4) as server:
        body = {"prompt": prompt, "max_tokens": NUM_GENERATED, "temperature": 0, "ignore_eos": True}
        reply = await server.post("/v1/completions", body)
        info = (await server.get("/model_info")).json()
    assert_greedy(example.oracle, prompt, tokens_of(reply.json()["choices"][0]["text"]))
    assert info["architectures"] == [read_description(example.directory).architecture]


async def test_c422_c512_64_at_once_give_what_each_gives_alone(library: Library) -> None:
    """Mixed lengths, cold and then from the cache: equal ids but for ties, and equal log-probabilities."""
    example = library.example("qwen3")
    write_character_tokenizer(example.directory, COMMON["vocab_size"])
    prompts = [(example.token_ids * 2)[start : start + 1 + start * 7 % 61] for start in range(64 // 2)]
    prompts += [[3 + start, *prompt] for start, prompt in enumerate(prompts)]
    options: dict[str, Any] = {"page_size": 4, "chunked_prefill_size": 32, "max_total_tokens": 8192}

    async def ask(server: LocalServer, index: int) -> tuple[list[int], list[float], int]:
        sampling = {"max_new_tokens": 4 + index % 9, "ignore_eos": True}
        result = await server.generate(input_ids=prompts[index], sampling=sampling, return_logprob=True)
        scores = [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]
        return result["output_ids"], scores, result["meta_info"]["cached_tokens"]

    async with local_server(example.directory, max_running_requests=64, **options) as server:
        alone = []
        for index in range(64):
            await server.post("/flush_cache")
            alone.append(await ask(server, index))
        await server.post("/flush_cache")
        for _ in range(2):
            together = await asyncio.gather(*(ask(server, index) for index in range(64)))
            for prompt, (ids, scores, _), (other, others, _) in zip(prompts, alone, together, strict=True):
                if other == ids:
                    assert others == pytest.approx(scores, abs=1e-4)
                else:
                    assert_greedy(example.oracle, prompt, other)
            assert sum(one[0] == other[0] for one, other in zip(alone, together, strict=True)) >= 62
    assert sum(cached for _, _, cached in alone) == 0
    assert sum(cached for _, _, cached in together) > 500


def test_c017_a_refused_model_is_named_before_a_process_starts(tmp_path: Path, library: Library) -> None:
    example = library.example("deepseek_v3")
    config = json.loads((example.directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["DeepseekV4ForCausalLM"]}))
    with pytest.raises(StartupError, match=r"DeepseekV4ForCausalLM is not served: .*hyper-connections"):
        startup.prepare(ServerConfig(model_path=str(tmp_path), device="cpu"))
