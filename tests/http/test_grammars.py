"""Constrained outputs over HTTP: every kind of grammar, how it fails, and what it is combined with."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from sglang_lite.grammar.compiler import Compiled
from sglang_lite.types import Grammar
from tests.support.server import LocalServer, local_server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 2, 30]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "A<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["A"]}
END = 258
THINK_END = 259


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["xgrammar", "llguidance"])
async def constrained(request: pytest.FixtureRequest, chain_model: Path) -> AsyncIterator[LocalServer]:
    """A server with each backend; few pages, so that requests are preempted, and small chunks."""
    async with local_server(
        chain_model, page_size=1, max_total_tokens=400, chunked_prefill_size=8, grammar_backend=request.param
    ) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def without_backend(chain_model: Path) -> AsyncIterator[LocalServer]:
    """A server with ``--grammar-backend none``."""
    async with local_server(chain_model, page_size=1, max_total_tokens=256, grammar_backend="none") as started:
        yield started


async def generate(server: LocalServer, prompt: str = "A", **parameters: Any) -> dict[str, Any]:
    answers = await server.generate(prompt, sampling={"max_new_tokens": 64, **parameters})
    assert isinstance(answers, dict)
    return answers


async def refusal(server: LocalServer, path: str, body: dict[str, Any]) -> str:
    """The message of a 400; the server then still serves."""
    reply = await server.post(path, body)
    assert reply.status == 400, reply.text
    assert (await generate(server, max_new_tokens=2))["text"] == "BC"
    answer = reply.json()
    return str(answer["message"] if "message" in answer else answer["error"]["message"])


@pytest.mark.parametrize("temperature", [0, 1])
async def test_c217_regex(constrained: LocalServer, temperature: float) -> None:
    """C217."""
    answer = await generate(constrained, regex="[0-9]{3}", temperature=temperature)
    assert re.fullmatch("[0-9]{3}", answer["text"])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": END}
    assert answer["meta_info"]["completion_tokens"] == 4


async def test_json_schema(constrained: LocalServer) -> None:
    parameters = {"json_schema": json.dumps(SCHEMA), "temperature": 2, "max_new_tokens": 300}
    answers = await asyncio.gather(*(generate(constrained, sampling_seed=seed, **parameters) for seed in range(6)))
    for answer in answers:
        assert answer["meta_info"]["finish_reason"]["type"] == "stop", answer
        jsonschema.validate(json.loads(answer["text"]), SCHEMA)
    assert len({answer["text"] for answer in answers}) > 1


async def test_ebnf(constrained: LocalServer) -> None:
    answer = await generate(constrained, ebnf='root ::= "x" pair\npair ::= "B"+ | "yz"')
    assert re.fullmatch("x(B+|yz)", answer["text"])


async def test_structural_tag(constrained: LocalServer) -> None:
    """Free text until the trigger, then the tag is forced."""
    # The model says ``BCDA`` again and again.
    free = await generate(constrained, structural_tag=json.dumps(TAG), max_new_tokens=3)
    assert free["text"] == "BCD"
    ends = {"stop": ["</f>"], "no_stop_trim": True}
    forced = await generate(constrained, structural_tag=json.dumps(TAG), max_new_tokens=200, **ends)
    assert forced["text"].startswith("BCDA<f>"), forced
    found = re.search(r"<f>(.*)</f>", forced["text"], re.DOTALL)
    assert found is not None, forced
    jsonschema.validate(json.loads(found[1]), SCHEMA)


async def test_response_formats(constrained: LocalServer) -> None:
    formats: list[dict[str, Any]] = [
        {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
        {"type": "json_object"},
    ]
    for form in formats:
        body = {
            "model": "chain",
            "messages": [{"role": "user", "content": "A"}],
            "response_format": form,
            "max_tokens": 80,
            "logit_bias": {str(ord("}")): 6},
        }
        choice = (await constrained.post("/v1/chat/completions", body)).json()["choices"][0]
        assert choice["finish_reason"] == "stop", choice
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    body = {"model": "chain", "prompt": "A", "regex": "q+r", "max_tokens": 40, "temperature": 0}
    text = (await constrained.post("/v1/completions", body)).json()["choices"][0]["text"]
    assert re.fullmatch("q+r?", text)


async def test_streams_choices_and_stop_strings(constrained: LocalServer) -> None:
    body = {
        "model": "chain",
        "prompt": "A",
        "ebnf": 'root ::= ("ab" | "cd"){4} "!"',
        "max_tokens": 20,
        "n": 3,
        "temperature": 1,
        "stream": True,
    }
    texts = {0: "", 1: "", 2: ""}
    async with constrained.session.post(constrained.url + "/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
    assert all(re.fullmatch("(ab|cd){4}!", text) for text in texts.values()), texts
    stopped = await generate(constrained, regex="abcdef", stop=["cd"])
    assert stopped["text"] == "ab"
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "cd"}


async def test_cut_by_the_limit(constrained: LocalServer) -> None:
    answer = await generate(constrained, regex="x{40}", max_new_tokens=7)
    assert answer["text"] == "x" * 7
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 7}


async def test_least_tokens_give_way_to_a_complete_text(constrained: LocalServer) -> None:
    answer = await generate(constrained, regex="abc", min_new_tokens=10)
    assert answer["text"] == "abc"
    longer = await generate(constrained, regex="a{2,30}", min_new_tokens=10, logit_bias={str(END): 50})
    assert longer["text"] == "a" * 10


async def test_preempted_and_beside_free_requests(constrained: LocalServer) -> None:
    """More tokens than the pool holds: requests are preempted, resumed from the cache, and still match."""
    calls = [
        generate(constrained, prompt="A" * 30 + str(index), regex="[0-9]{40}[a-c]{20}", max_new_tokens=62)
        for index in range(8)
    ]
    free = [generate(constrained, prompt="A", max_new_tokens=40) for _ in range(4)]
    answers = await asyncio.gather(*calls, *free)
    for answer in answers[:8]:
        assert re.fullmatch("[0-9]{40}[a-c]{20}", answer["text"])
    assert {answer["text"] for answer in answers[8:]} == {"BCDA" * 10}
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"regex": "(a"}, "regex"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"regex": "a\0b"}, "NUL"),
        ({"json_schema": '{"type": "nope"}'}, "nope"),
        ({"json_schema": "not json"}, "json_schema"),
        ({"json_schema": "false"}, "json_schema"),
        ({"json_schema": '{"type": "integer", "minimum": 5, "maximum": 3}'}, "json_schema"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "Only one of json_schema, regex, ebnf, or structural_tag can be set."),
        ({"regex": "a" * 300_000}, "300000"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"regex": 5}, "regex"),
    ],
)
async def test_bad_grammars(constrained: LocalServer, parameters: dict[str, Any], named: str) -> None:
    message = await refusal(constrained, "/generate", {"text": "A", "sampling_params": parameters})
    assert named in message
    assert not re.search(r"\.cc:\d+", message), "no place in a library's source"
    streamed = {"text": "A", "sampling_params": parameters, "stream": True}
    assert await refusal(constrained, "/generate", streamed) == message


@pytest.mark.parametrize(
    "form",
    [{"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}, {"type": "yaml"}, "text", {}],
)
async def test_bad_response_formats(constrained: LocalServer, form: Any) -> None:
    body = {"model": "chain", "messages": [{"role": "user", "content": "A"}], "response_format": form}
    message = await refusal(constrained, "/v1/chat/completions", body)
    assert "response_format" in message or "json_schema" in message


async def test_abort_while_compiling(constrained: LocalServer) -> None:
    """B13: a request that waits for its grammar ends with an abort, without a token, and at once."""
    front = constrained.engine._flow.grammars
    assert front is not None
    waiting = asyncio.Event()

    class NeverReady:
        num_waiting = 1

        def submit(self, grammar: Grammar) -> Future[Compiled]:
            waiting.set()
            return Future()

    original, front._compiler = front._compiler, NeverReady()  # type: ignore[assignment]
    try:
        body = {"text": "A", "rid": "slow", "sampling_params": {"regex": "abc"}}
        task = asyncio.create_task(constrained.post("/generate", body))
        await waiting.wait()
        assert (await constrained.load())["queues"]["grammar"] == 1
        started = time.monotonic()
        assert (await constrained.post("/abort_request", {"rid": "slow"})).status == 200
        reply = (await task).json()
        assert time.monotonic() - started < 1
    finally:
        front._compiler = original
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert reply["output_ids"] == []
    await constrained.idle()


async def test_without_a_backend(without_backend: LocalServer) -> None:
    message = await refusal(without_backend, "/generate", {"text": "A", "sampling_params": {"regex": "a"}})
    assert message.startswith("Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def thinking(chain_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalServer]:
    """A server whose model has markers of reasoning as tokens, and begins its answers inside."""
    directory = tmp_path_factory.mktemp("thinking")
    for file in chain_model.iterdir():
        text = file.read_bytes()
        if file.name.startswith("tokenizer"):
            text = text.replace(b"<|bos|>", b"<think>").replace(b"<|pad|>", b"</think>")
        (directory / file.name).write_bytes(text)
    options = {"reasoning_parser": "qwen3-thinking", "speculative_algorithm": "NGRAM"}
    async with local_server(directory, page_size=1, max_total_tokens=2000, **options) as started:
        yield started


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_begins_behind_the_reasoning(thinking: LocalServer, stream: bool) -> None:
    """The reasoning is free, the answer is what the schema says."""
    bodies: list[dict[str, Any]] = [
        {
            "model": "chain",
            "messages": [{"role": "user", "content": "A"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
            "max_tokens": 300,
            "seed": seed,
            "temperature": 1,
            "logit_bias": {str(THINK_END): 4.5, str(END): -50},
            "stream": stream,
        }
        for seed in range(4)
    ]
    replies = await asyncio.gather(*(thinking.post("/v1/chat/completions", body) for body in bodies))
    thoughts = set()
    for reply in replies:
        assert reply.status == 200, reply.text
        if stream:
            deltas = [
                chunk["choices"][0]["delta"] for chunk in reply.events if chunk != "[DONE]" and chunk.get("choices")
            ]
            reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
            content = "".join(delta.get("content") or "" for delta in deltas)
        else:
            message = reply.json()["choices"][0]["message"]
            reasoning, content = message["reasoning_content"], message["content"]
        thoughts.add(reasoning)
        jsonschema.validate(json.loads(content), SCHEMA)
    assert len(thoughts) > 1 and max(map(len, thoughts)) > 3


async def test_reasoning_turned_off_leaves_the_grammar_at_the_start(thinking: LocalServer) -> None:
    native = {"text": "A", "sampling_params": {"regex": "[0-9]{3}", "max_new_tokens": 60, "temperature": 0}}
    assert re.fullmatch("[0-9]{3}", (await thinking.post("/generate", native)).json()["text"])
    native["sampling_params"]["logit_bias"] = {str(THINK_END): 5.7}  # type: ignore[index]
    native["require_reasoning"] = True
    answer = (await thinking.post("/generate", native)).json()
    ids = answer["output_ids"]
    place = ids.index(THINK_END)
    assert re.fullmatch("[0-9]{3}", bytes(ids[place + 1 : place + 4]).decode())
    assert ids[place + 4 :] == [END]


async def test_required_reasoning_without_a_parser(constrained: LocalServer) -> None:
    body = {"text": "A", "sampling_params": {"regex": "a"}, "require_reasoning": True}
    assert "--reasoning-parser" in await refusal(constrained, "/generate", body)


async def test_meta_info_says_what_became_of_guesses(thinking: LocalServer, constrained: LocalServer) -> None:
    """``spec_*`` under speculation, consistent with one another; nothing without."""
    answer = await generate(thinking, "A", max_new_tokens=60, temperature=0, ignore_eos=True)
    info = answer["meta_info"]
    histogram = info["spec_correct_drafts_histogram"]
    correct = sum(count * times for count, times in enumerate(histogram))
    assert info["spec_num_correct_drafts"] == correct > 20
    assert info["spec_verify_ct"] == sum(histogram)
    assert info["spec_accept_rate"] == correct / info["spec_num_proposed_drafts"] <= 1
    assert info["spec_accept_length"] == 1 + correct / info["spec_verify_ct"]
    assert info["completion_tokens"] == 60
    plain = await generate(constrained, "A", max_new_tokens=20, temperature=0)
    assert not any(name.startswith("spec_") for name in plain["meta_info"])
