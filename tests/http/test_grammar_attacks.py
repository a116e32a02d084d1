"""B18 and B19: schemas and patterns of every awkward kind, and the other clients while they come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest
import pytest_asyncio

from tests.support.server import LocalServer, greedy, local_server

NOT_SLOWER = 0.25
"""Seconds between two events that a busy machine of two processors makes by itself; what freezes takes seconds."""

TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "v": {"enum": [1, 2]},
                "c": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["v"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}


def nested(depth: int, combination: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"enum": [1]}
    for level in range(depth):
        schema = {combination: [schema, {"enum": [f"v{level}"]}]}
    return schema


SATISFIABLE: list[tuple[str, Any]] = [
    ("recursive with a base case", TREE),
    ("no properties", {"type": "object", "properties": {}}),
    ("not ascii", {"enum": ["é"]}),
    ("the empty string", {"enum": [""]}),
    ("5,000 values", {"enum": [f"value {index}" for index in range(5000)]}),
    ("oneOf 12 deep", nested(12, "oneOf")),
    ("anyOf 12 deep", nested(12, "anyOf")),
    ("null", {"type": "null"}),
    ("a pattern", {"type": "string", "pattern": "^[ab]{2}$"}),
]
REFUSED: list[tuple[str, Any, str]] = [
    ("itself", {"$ref": "#"}, "#"),
    ("a null character", {"enum": ["\0"]}, "#/enum/0"),
    (
        "each other",
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "#/$defs/",
    ),
    ("a banana", {"type": "banana"}, "#/type"),
    ("false", False, "#"),
    ("a list", [], "#"),
    ("a string", "object", "#"),
    ("a number", 7, "#"),
    ("2 MB", {"enum": ["x" * 2_000_000]}, "characters"),
    ("a broken pattern", {"properties": {"a": {"type": "string", "pattern": "("}}}, "#/properties/a"),
    ("a pattern that looks back", {"items": {"type": "string", "pattern": "(?<=x)y"}}, "#/items"),
    (
        "nothing below it",
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]},
        "#/properties/a",
    ),
]
PATTERNS: list[dict[str, Any]] = [
    {"regex": "a{40}"},
    {"regex": "("},
    {"regex": "(?<=x)y"},
    {"regex": "a{1,100000}"},
    {"regex": "(a|aa)+$"},
    {"regex": "(" + "|".join(f"word{index}" for index in range(12_000)) + ")"},
    {"stop_regex": "(a+)+b"},
    {"stop_regex": "(a|aa)+$"},
    {"stop_regex": "("},
    {"stop_regex": "x" * 100_000},
    {"stop_regex": "(.*){50}z"},
]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["xgrammar", "llguidance"])
async def attacked(request: pytest.FixtureRequest, chain_model: Path) -> AsyncIterator[LocalServer]:
    async with local_server(chain_model, page_size=1, max_total_tokens=8000, grammar_backend=request.param) as started:
        # The process that compiles starts with the first grammar.
        assert (await started.generate("A", sampling={"regex": "[0-9]", "max_new_tokens": 4}))["text"]
        yield started


async def ask(server: LocalServer, schema: Any, seed: int = 0) -> Any:
    sampling = {"json_schema": json.dumps(schema), "max_new_tokens": 200, "temperature": 1, "sampling_seed": seed}
    return await server.post("/generate", {"text": "A", "sampling_params": sampling})


@pytest.mark.parametrize("schema", [schema for _, schema in SATISFIABLE], ids=[name for name, _ in SATISFIABLE])
async def test_b18_what_can_be_satisfied_is(attacked: LocalServer, schema: Any) -> None:
    """B18"""
    replies = await asyncio.gather(*(ask(attacked, schema, seed) for seed in range(3)))
    for reply in replies:
        assert reply.status == 200, reply.text
        answer = reply.json()
        if answer["meta_info"]["finish_reason"]["type"] == "stop":  # else the limit cut it
            jsonschema.validate(json.loads(answer["text"]), schema)


@pytest.mark.parametrize("schema", [True, {}], ids=["true", "empty"])
async def test_b18_any_json(attacked: LocalServer, schema: Any) -> None:
    reply = await ask(attacked, schema)
    assert reply.status == 200, reply.text
    answer = reply.json()
    if answer["meta_info"]["finish_reason"]["type"] == "stop":
        json.loads(answer["text"])


@pytest.mark.parametrize(("schema", "place"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
async def test_b18_what_cannot_is_a_400_that_says_where(attacked: LocalServer, schema: Any, place: str) -> None:
    started = time.monotonic()
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    body = {"model": "chain", "messages": [{"role": "user", "content": "A"}], "response_format": form}
    for path, request in (
        ("/generate", {"text": "A", "sampling_params": {"json_schema": json.dumps(schema)}}),
        ("/v1/chat/completions", body),
    ):
        reply = await attacked.post(path, request)
        assert reply.status in (400, 413), reply.text[:500]
        assert place in reply.text, reply.text[:500]
    assert time.monotonic() - started < 25
    assert (await attacked.generate("A", sampling={"max_new_tokens": 2, "temperature": 0}))["text"] == "BC"


async def gaps(server: LocalServer, until: asyncio.Event) -> list[float]:
    """Seconds between the events of streams that go on, one after another, until the event."""
    found: list[float] = []
    body = greedy("A", {"max_new_tokens": 300, "ignore_eos": True})
    async with aiohttp.ClientSession() as session:
        while not until.is_set():
            async with session.post(server.url + "/generate", json={**body, "stream": True}) as response:
                last: float | None = None
                async for line in response.content:
                    if line.startswith(b"data:"):
                        now = time.monotonic()
                        if last is not None:
                            found.append(now - last)
                        last = now
    return found


async def beside(server: LocalServer, attack: list[dict[str, Any]] | None) -> float:
    """The 99th percentile of four streams' gaps: for a second in peace, or while the requests of an attack are made."""
    done = asyncio.Event()
    streams = [asyncio.create_task(gaps(server, done)) for _ in range(4)]
    if attack is None:
        await asyncio.sleep(1.0)  # measured, not waited for
    else:
        replies = await asyncio.gather(*(server.post("/generate", body) for body in attack))
        for body, reply in zip(attack, replies, strict=True):
            assert reply.status in (200, 400, 413, 429), (str(body)[:200], reply.text[:300])
    done.set()
    found = sorted(gap for stream in await asyncio.gather(*streams) for gap in stream)
    return found[len(found) * 99 // 100]


async def test_b19_patterns_freeze_nobody(attacked: LocalServer) -> None:
    """B19: what is broken is a 400, what is expensive is bounded, and streams beside it go on as before."""
    peace = await beside(attacked, None)
    attack = [
        {"text": "A", "sampling_params": {**pattern, "max_new_tokens": 64, "temperature": 1}}
        for pattern in PATTERNS
        for _ in range(3)
    ]
    war = await beside(attacked, attack)
    assert war < max(2 * peace, NOT_SLOWER), (peace, war)
    for broken in ({"regex": "("}, {"regex": "(?<=x)y"}, {"stop_regex": "("}):
        reply = await attacked.post("/generate", {"text": "A", "sampling_params": broken})
        assert reply.status == 400 and next(iter(broken)) in reply.text


async def test_b18_schemas_freeze_nobody(attacked: LocalServer) -> None:
    peace = await beside(attacked, None)
    schemas = [case[1] for case in (*SATISFIABLE, *REFUSED)]
    # Another spelling is another grammar: nothing here is found compiled.
    attack = [
        {"text": "A", "sampling_params": {"json_schema": json.dumps(schema) + " ", "max_new_tokens": 16}}
        for schema in schemas
    ]
    war = await beside(attacked, attack)
    assert war < max(2 * peace, NOT_SLOWER), (peace, war)


NEEDS_ITSELF: list[dict[str, Any]] = [
    {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    {"$defs": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
    {
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
            "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
        },
        "$ref": "#/$defs/a",
    },
]


@pytest.mark.parametrize("schema", NEEDS_ITSELF, ids=["object", "array", "two"])
async def test_b18_what_needs_itself_for_ever(attacked: LocalServer, schema: dict[str, Any]) -> None:
    reply = await ask(attacked, schema)
    assert reply.status == 400 and "of its own kind" in reply.text and "#" in reply.text
    optional = {**NEEDS_ITSELF[0], "required": []}
    assert (await ask(attacked, optional)).status == 200
    either = {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n"]}
    assert (await ask(attacked, either)).status == 200


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "((a{0,1000}){0,1000}){0,1000}"},
        {"regex": "((a{0,100}){0,100}){0,100}"},
        {"json_schema": json.dumps({"type": "string", "pattern": "^((a{0,100}){0,100}){0,100}$"})},
    ],
    ids=["thousand", "hundred", "pattern"],
)
async def test_b19_what_compiles_fast_and_matches_slowly(attacked: LocalServer, grammar: dict[str, Any]) -> None:
    """It is refused, or a token of it is cheap; the engine never waits for it."""
    peace = await beside(attacked, None)
    request = {"text": "A", "sampling_params": {**grammar, "max_new_tokens": 32, "temperature": 1}}
    war = await beside(attacked, [request])
    assert war < max(2 * peace, NOT_SLOWER), (peace, war)
