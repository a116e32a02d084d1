"""Faults of streamed text seen in this field (B01 to B07), over the routes, with a model that emits chosen tokens."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.frontend.tokenizer import Tokenizer
from tests.support.scripted_model import ScriptedModel
from tests.support.server import read_event
from tests.unit.server.test_routes import serving

EOS = 258
SAMPLE = "삼겹살 👩‍👩‍👧‍👦 Ünïcødé 中文"
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
PATHS = [GENERATE, COMPLETIONS, CHAT]


@pytest.fixture(scope="module")
def tokenizer(chain_model: Path) -> Tokenizer:
    """Bytes are tokens 0 to 255."""
    return Tokenizer.load(str(chain_model))


def body_of(path: str, **parameters: Any) -> dict[str, Any]:
    if path == GENERATE:
        return {"input_ids": [1], "sampling_params": parameters}
    prompt = {"prompt": [1]} if path == COMPLETIONS else {"input_ids": [1]}
    return {**prompt, **parameters}


async def unary(model: ScriptedModel, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with serving(model) as (client, _):
        response = await client.post(path, json=body)
        assert response.status == 200, await response.text()
        reply: dict[str, Any] = await response.json()
        return reply


async def streamed(model: ScriptedModel, path: str, body: dict[str, Any]) -> list[Any]:
    async with serving(model) as (client, _):
        response = await client.post(path, json={**body, "stream": True})
        data = await response.read()
    events = [read_event(block) for block in data.split(b"\n\n") if block]
    assert events[-1] == "[DONE]"
    return events[:-1]


def text_of(path: str, reply: dict[str, Any]) -> str:
    if path == GENERATE:
        return str(reply["text"])
    choice = reply["choices"][0]
    return str(choice["text"] if path == COMPLETIONS else choice["message"]["content"])


def pieces(path: str, events: list[Any]) -> list[str]:
    """What each event adds."""
    if path == GENERATE:
        texts = [event["text"] for event in events]
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
        return [after[len(before) :] for before, after in zip(["", *texts], texts, strict=False)]
    choices = [event["choices"][0] for event in events if event["choices"]]
    return [one["text"] if path == COMPLETIONS else one["delta"].get("content") or "" for one in choices]


def ending_of(path: str, reply: dict[str, Any]) -> Any:
    """What the reply says about the stop that ended it."""
    if path == GENERATE:
        return reply["meta_info"]["finish_reason"].get("matched")
    return reply["choices"][0]["matched_stop"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cut", [0, 1, 2, 3])
async def test_b01_characters_of_several_tokens(tokenizer: Tokenizer, path: str, cut: int) -> None:
    """B01: with ``cut`` the output ends so many bytes before the end of its last character."""
    token_ids = list(SAMPLE.encode())[: len(SAMPLE.encode()) - cut]
    if not cut:
        token_ids.append(EOS)
    whole = text_of(path, await unary(ScriptedModel(tokenizer, token_ids), path, body_of(path)))
    parts = pieces(path, await streamed(ScriptedModel(tokenizer, token_ids), path, body_of(path)))
    assert "".join(parts) == whole
    if cut in (0, 3):
        assert whole == SAMPLE[: len(SAMPLE) - (cut == 3)]
    assert not any("\ufffd" in part for part in [part for part in parts if part][:-1])
    assert ("\ufffd" in whole) == (cut in (1, 2))


@pytest.mark.parametrize("per_frame", [1, 2, 3])
@pytest.mark.parametrize("prefix", ["A 世", "A 世a"])
async def test_b02_nothing_is_sent_twice_after_half_a_character(
    tokenizer: Tokenizer, prefix: str, per_frame: int
) -> None:
    """B02"""
    token_ids = [*(prefix + "界a界").encode(), EOS]
    model = ScriptedModel(tokenizer, token_ids, per_frame=per_frame)
    assert "".join(pieces(CHAT, await streamed(model, CHAT, body_of(CHAT)))) == prefix + "界a界"


@settings(max_examples=30, deadline=None)
@given(token_ids=st.lists(st.integers(0, 256), min_size=1, max_size=24), per_frame=st.integers(1, 6))
def test_b02_every_cut_of_every_token_list(chain_model: Path, token_ids: list[int], per_frame: int) -> None:
    """B02"""
    from sglang_lite.frontend.request import GenerateRequest
    from sglang_lite.types import SamplingParams

    tokenizer = Tokenizer.load(str(chain_model))
    request = GenerateRequest(request_id="r", input_ids=[1], stream=True, sampling=SamplingParams())
    model = ScriptedModel(tokenizer, token_ids, per_frame=per_frame)
    shown = [output for output in model.script(request) if not isinstance(output, Exception)]
    texts = [output.text for output in shown]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert texts[-1] == tokenizer.decode(token_ids)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("per_frame", [1, 2, 3, 10])
async def test_b03_no_part_of_a_stop_string_leaks(tokenizer: Tokenizer, path: str, per_frame: int) -> None:
    """B03"""
    model = ScriptedModel(tokenizer, list(b"ABCDEFGHIJ"), per_frame=per_frame)
    body = body_of(path, stop=["DEFGHIJ"])
    assert text_of(path, await unary(model, path, body)) == "ABC"
    parts = pieces(path, await streamed(model, path, body))
    assert "".join(parts) == "ABC"


async def test_b03_text_that_can_no_longer_be_a_stop_is_released(tokenizer: Tokenizer) -> None:
    """B03"""
    events = await streamed(ScriptedModel(tokenizer, list(b"ABCDEXYZ")), GENERATE, body_of(GENERATE, stop=["CDEF"]))
    texts = [event["text"] for event in events]
    assert not any(text in ("ABC", "ABCD", "ABCDE") for text in texts[:-1])
    assert "ABCDEX" in texts and texts[-1] == "ABCDEXYZ"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("output", "stop"), [("1\n2\n3", "\n<|endoftext|>"), ("What color?", "?\n")], ids=["newline", "question"]
)
async def test_b04_text_held_back_for_a_stop_is_flushed(
    tokenizer: Tokenizer, path: str, output: str, stop: str
) -> None:
    """B04"""
    model = ScriptedModel(tokenizer, [*output.encode(), EOS])
    body = body_of(path, stop=[stop])
    assert text_of(path, await unary(model, path, body)) == output
    assert "".join(pieces(path, await streamed(model, path, body))) == output


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("stops", "matched", "text"), [(["DE"], "DE", "ABC"), (["GH", "CD"], "CD", "AB")])
async def test_b05_stops_between_token_boundaries(
    tokenizer: Tokenizer, path: str, keep: bool, stops: list[str], matched: str, text: str
) -> None:
    """B05: the earliest occurrence wins and is named."""
    expected = text + matched if keep else text
    body = body_of(path, stop=stops, no_stop_trim=keep)
    for per_frame in (1, 3):
        model = ScriptedModel(tokenizer, list(b"ABCDEFGHI"), per_frame=per_frame)
        reply = await unary(model, path, body)
        assert (text_of(path, reply), ending_of(path, reply)) == (expected, matched)
        assert "".join(pieces(path, await streamed(model, path, body))) == expected


@pytest.mark.parametrize("per_frame", [1, 2, 7])
async def test_b06_ids_and_logprobs_end_with_the_stop(tokenizer: Tokenizer, per_frame: int) -> None:
    """B06: everything ends with the token that completed the stop string."""
    model = ScriptedModel(tokenizer, list(b"a b c d"), per_frame=per_frame)
    native = {**body_of(GENERATE, stop=["b c"]), "return_logprob": True, "top_logprobs_num": 2}
    replies = [await unary(model, GENERATE, native), (await streamed(model, GENERATE, native))[-1]]
    for reply in replies:
        meta = reply["meta_info"]
        assert reply["output_ids"] == list(b"a b c")
        assert [entry[1] for entry in meta["output_token_logprobs"]] == list(b"a b c")
        assert len(meta["output_top_logprobs"]) == meta["completion_tokens"] == 5
    body = body_of(COMPLETIONS, stop=["b c"], logprobs=2)
    reply = await unary(model, COMPLETIONS, body)
    choice, usage = reply["choices"][0], reply["usage"]
    assert len(choice["logprobs"]["tokens"]) == usage["completion_tokens"] == 5
    counted = {"stream_options": {"include_usage": True}}
    *events, last = await streamed(model, COMPLETIONS, {**body, **counted})
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [token for part in parts if part for token in part["tokens"]] == choice["logprobs"]["tokens"]
    assert last["usage"]["completion_tokens"] == 5
    chat = body_of(CHAT, stop=["b c"], logprobs=True, top_logprobs=2)
    whole = await unary(model, CHAT, chat)
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list("a b c")
    *events, last = await streamed(model, CHAT, {**chat, **counted})
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [entry for part in parts if part for entry in part["content"]] == content
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(("per_frame", "per_snapshot"), [(2, 1), (1, 2), (3, 1)])
async def test_b07_every_token_of_a_chunk_has_its_own_alternatives(
    tokenizer: Tokenizer, per_frame: int, per_snapshot: int
) -> None:
    """B07"""
    model = ScriptedModel(tokenizer, list(b"ABCDEF"), per_frame=per_frame, per_snapshot=per_snapshot)
    body = body_of(CHAT, logprobs=True, top_logprobs=3)
    whole = (await unary(model, CHAT, body))["choices"][0]["logprobs"]["content"]
    parts = [event["choices"][0]["logprobs"] for event in await streamed(model, CHAT, body) if event["choices"]]
    content = [part["content"] for part in parts if part]
    assert max(map(len, content)) > 1
    assert [entry for part in content for entry in part] == whole
    assert [entry["token"] for entry in whole] == list("ABCDEF")
    for entry, token in zip(whole, b"ABCDEF", strict=True):
        assert [one["token"] for one in entry["top_logprobs"]] == [chr(token), chr(token + 1), chr(token + 2)]
