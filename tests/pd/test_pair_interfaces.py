"""What clients ask of one server, asked of a pair with two front processes a side: the answers are the same."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.support.chain_model import build_chain_model
from tests.support.disaggregated_pair import DECODE, PATIENT, PREFILL, SIDES, Answer, Pair, is_idle
from tests.support.server import LocalServer, local_server

GREEDY = {"temperature": 0}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [3, 14]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
CHAT = {"model": "chain", "messages": [{"role": "user", "content": "A"}], "max_tokens": 6, "temperature": 0}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stop in the first token": ("/generate", {"text": "A", "sampling_params": {**GREEDY, "stop": ["B"]}}),
    "stop across the first token": ("/generate", {"text": "A", "sampling_params": {**GREEDY, "stop": ["BCD"]}}),
    "stop that is kept": (
        "/generate",
        {"text": "A", "sampling_params": {**GREEDY, "stop": ["BC"], "no_stop_trim": True}},
    ),
    "end at once": ("/generate", {"text": "z", "sampling_params": GREEDY}),
    "characters of several tokens": ("/generate", {"text": "a", "sampling_params": GREEDY}),
    "nothing wanted": ("/generate", {"text": "A", "sampling_params": {**GREEDY, "max_new_tokens": 0}}),
    "scores": (
        "/generate",
        {"text": "AB", "return_logprob": True, "top_logprobs_num": 3, "return_text_in_logprobs": True,
         "token_ids_logprob": [65], "sampling_params": {**GREEDY, "max_new_tokens": 3}},
    ),
    "the longest prompt": ("/generate", {"input_ids": [65] * 1023, "sampling_params": {**GREEDY, "ignore_eos": True}}),
    "too long": ("/generate", {"input_ids": [65] * 1024, "sampling_params": GREEDY}),
    "chat": ("/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    "completions": (
        "/v1/completions",
        {"model": "chain", "prompt": ["A", "p"], "max_tokens": 4, "temperature": 0, "logprobs": 2, "n": 2},
    ),
    "echo": ("/v1/completions", {"model": "chain", "prompt": "pq", "max_tokens": 4, "temperature": 0, "echo": True}),
    "responses": ("/v1/responses", {"model": "chain", "input": "A", "max_output_tokens": 5, "temperature": 0}),
    "responses stream": (
        "/v1/responses",
        {"model": "chain", "input": "A", "max_output_tokens": 5, "temperature": 0, "stream": True},
    ),
    "messages": ("/v1/messages", {**CHAT, "stop_sequences": ["CD"]}),
    "messages stream": ("/v1/messages", {**CHAT, "stream": True}),
}  # fmt: skip

GRAMMARS: dict[str, tuple[str, dict[str, Any]]] = {
    "regex": ("/generate", {"text": "A", "sampling_params": {**GREEDY, "regex": "[CDx]{3}y"}}),
    "chat json": ("/v1/chat/completions", {**CHAT, "max_tokens": 40, "response_format": FORMAT, "stream": True}),
    "tool stream": (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 90, "tools": TOOLS, "tool_choice": "required", "stream": True},
    ),
}

_TOLD = frozenset(
    ("text", "output_ids", "finish_reason", "content", "arguments", "name", "partial_json", "delta", "stop_reason",
     "logprobs", "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "usage", "prompt_tokens",
     "completion_tokens", "error", "input_tokens", "output_tokens", "status")
)  # fmt: skip
_PASSED = frozenset(
    ("choices", "message", "meta_info", "tool_calls", "function", "output", "response", "content_block")
)


def essence(value: Any) -> Any:
    """What an answer says, without names, times and places."""
    if isinstance(value, list):
        return [essence(item) for item in value]
    if isinstance(value, dict):
        kept = {key: essence(item) for key, item in value.items() if key in _TOLD or key in _PASSED}
        return kept or {
            key: essence(item)
            for key, item in value.items()
            if isinstance(item, (list, float, int)) and key != "sequence_number"
        }
    return round(value, 3) if isinstance(value, float) else value


def pieces(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of an event."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from pieces(item, f"{path}/{key}")
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from pieces(item, f"{path}/{at}")
    else:
        yield path, value


def told(status: int, body: Any) -> Any:
    """Of an answer or a stream, however that is cut."""
    if not isinstance(body, str):
        return status, essence(body)
    joined: dict[str, Any] = {}
    for line in body.splitlines():
        if line.startswith("data: {"):
            for path, value in pieces(essence(json.loads(line[6:]))):
                is_text = isinstance(value, str) and path.endswith(
                    ("content", "arguments", "delta", "delta/text", "partial_json")
                )
                joined[path] = joined.get(path, "") + value if is_text else value
    return status, joined, body.count("data: [DONE]")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chain_model(tmp_path_factory.mktemp("chain") / "chain")


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    options = ["--served-model-name", "chain", "--tokenizer-worker-num", "2", "--tool-call-parser", "hermes"]
    options += ["--max-queued-requests", "600", "--drain-timeout", "10"]
    directory = tmp_path_factory.mktemp("pair")
    pair = Pair("tcp", model, directory, with_text=True, environment=PATIENT, options=options)
    try:
        pair.start()
        yield pair
    finally:
        pair.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(model: Path) -> AsyncIterator[LocalServer]:
    options = {"served_model_name": "chain", "tool_call_parser": "hermes"}
    async with local_server(model, max_total_tokens=1024, max_running_requests=4, **options) as server:
        yield server


def paired(pair: Pair, body: dict[str, Any]) -> dict[str, Any]:
    return {
        **body,
        "bootstrap_host": pair.bootstrap_host,
        "bootstrap_port": pair.bootstrap_port,
        "bootstrap_room": random.getrandbits(62),
    }


def ask(pair: Pair, path: str, body: dict[str, Any]) -> dict[str, asyncio.Task[Answer]]:
    return {role: asyncio.create_task(pair.send(role, body, path, 60.0)) for role in SIDES}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("cases", [CASES, GRAMMARS], ids=["plain", "grammars"])
async def test_answers_are_those_of_one_server(
    pair: Pair, whole: LocalServer, cases: dict[str, tuple[str, dict[str, Any]]]
) -> None:
    wrong: dict[str, Any] = {}
    for name, (path, body) in cases.items():
        reply = await whole.post(path, body)
        text = reply.text
        expected = told(reply.status, json.loads(text) if "json" in reply.headers["Content-Type"] else text)
        calls = ask(pair, path, paired(pair, body))
        answer, prefilled = await calls[DECODE], await calls[PREFILL]
        got = told(answer.status, answer.body)
        if got != expected or (prefilled.status == 200) != (answer.status == 200):
            wrong[name] = expected, got, prefilled
    assert not wrong, json.dumps(wrong, indent=1, default=str)
    await pair.settled()


@pytest.mark.asyncio(loop_scope="module")
async def test_scores_of_prompts_are_the_prefill_servers(pair: Pair, whole: LocalServer) -> None:
    body = {"text": "ABp", "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 2}}
    expected = (await whole.post("/generate", body)).json()["meta_info"]["input_token_logprobs"]
    answer = await ask(pair, "/generate", paired(pair, body))[PREFILL]
    assert essence(answer.body["meta_info"]["input_token_logprobs"]) == essence(expected)
    echoed = {"model": "chain", "prompt": "pq", "max_tokens": 2, "echo": True, "logprobs": 1, "temperature": 0}
    reply = (await whole.post("/v1/completions", echoed)).json()["choices"][0]
    calls = ask(pair, "/v1/completions", paired(pair, echoed))
    scored = (await calls[PREFILL]).body["choices"][0]["logprobs"]
    assert scored["tokens"] == reply["logprobs"]["tokens"][:3]  # and the first one drawn
    assert essence(scored["token_logprobs"]) == essence(reply["logprobs"]["token_logprobs"][:3])
    drawn = (await calls[DECODE]).body["choices"][0]["logprobs"]
    assert drawn["text_offset"] == reply["logprobs"]["text_offset"][2:]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_refusal_of_the_prefill_servers_engine_ends_the_wait(pair: Pair) -> None:
    """A queue that is full answers 429 or 503 there; the decode server's client does not wait for its time-out."""
    pair.hold("done")
    bodies = [paired(pair, {"text": "A", "sampling_params": {"max_new_tokens": 2}}) for _ in range(605)]
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post(role: str, body: dict[str, Any]) -> int:
            async with session.post(pair.sides[role].url + "/generate", json=body) as reply:
                await reply.read()
                return reply.status

        waiting = [asyncio.create_task(post(PREFILL, body)) for body in bodies]
        refused = asyncio.Event()
        for task in waiting:
            task.add_done_callback(lambda task: refused.set())
        await asyncio.wait_for(refused.wait(), 15)
        at = next(at for at, task in enumerate(waiting) if task.done())
        assert waiting[at].result() in (429, 503)
        answer = await asyncio.wait_for(pair.send(DECODE, bodies[at]), 3.0)
        assert answer.is_failure
        assert "refused" in json.dumps(answer.body)
        pair.open()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    await pair.settled(20)


@pytest.mark.asyncio(loop_scope="module")
async def test_many_at_once(pair: Pair) -> None:
    """Far more pairs than either side has rows or pages for, in another order on each side."""
    bodies = [
        paired(
            pair, {"text": "A" * (1 + at % 90), "sampling_params": {"max_new_tokens": 1 + at % 9, "ignore_eos": True}}
        )
        for at in range(250)
    ]
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post(role: str, body: dict[str, Any]) -> tuple[int, Any]:
            async with session.post(pair.sides[role].url + "/generate", json=body) as reply:
                return reply.status, await reply.json()

        decoded = [asyncio.create_task(post(DECODE, body)) for body in bodies]
        await asyncio.gather(*[post(PREFILL, body) for body in reversed(bodies)])
        for at, (status, answer) in enumerate(await asyncio.gather(*decoded)):
            assert status == 200, answer
            assert answer["meta_info"]["completion_tokens"] == 1 + at % 9
    await pair.settled()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("role", SIDES)
@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_a_pause_while_pages_move(pair: Pair, role: str, mode: str) -> None:
    """Requests go on when it ends, or end with it; the caches can be emptied afterwards."""
    pair.hold("half")
    calls = ask(pair, "/generate", paired(pair, {"text": "A" * 40, "sampling_params": {**GREEDY, "max_new_tokens": 5}}))
    await pair.until(PREFILL, lambda load: load["disaggregation"]["prefill_inflight_queue_reqs"] == 1)
    assert (await pair.send(role, {"mode": mode}, "/pause_generation")).status == 200
    pair.open()
    if mode == "abort":
        assert (await asyncio.wait_for(calls[DECODE], 3.0)).is_failure
        assert (await asyncio.wait_for(calls[PREFILL], 3.0)).is_failure
    elif role == DECODE:
        await pair.until(PREFILL, is_idle)
        assert not calls[DECODE].done()
    assert (await pair.send(role, {}, "/continue_generation")).status == 200
    if mode != "abort":
        assert (await asyncio.wait_for(calls[DECODE], 5.0)).body["text"] == "BCDAB"
    await pair.settled()
    for side in SIDES:
        assert (await pair.send(side, {}, "/flush_cache")).status == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_probes_and_pages_of_the_prefix_cache(pair: Pair) -> None:
    async with aiohttp.ClientSession() as session:
        for role in SIDES:
            async with session.get(pair.sides[role].url + "/health_generate") as reply:
                assert reply.status == 200
    body = {"text": "A" * 70, "sampling_params": {**GREEDY, "max_new_tokens": 3}}
    cached = [
        (await ask(pair, "/generate", paired(pair, body))[DECODE]).body["meta_info"]["cached_tokens"] for _ in range(2)
    ]
    assert cached == [0, 64]


@pytest.mark.asyncio(loop_scope="module")
async def test_terminating_the_decode_server_lets_streams_end(pair: Pair) -> None:
    body = paired(pair, {"text": "A", "stream": True, "sampling_params": {**GREEDY, "max_new_tokens": 300}})
    prefilled = asyncio.create_task(pair.send(PREFILL, body))
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(pair.sides[DECODE].url + "/generate", json=body) as reply,
    ):
        await reply.content.readline()
        ending = asyncio.create_task(asyncio.to_thread(pair.sides[DECODE].terminate))
        text = (await reply.read()).decode()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert events[-1]["meta_info"]["completion_tokens"] == 300
    assert await ending < 10
    assert (await prefilled).status == 200
    await pair.until(PREFILL, is_idle)
