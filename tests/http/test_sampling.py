"""Sampling and log-probabilities over HTTP (acceptance section 3). The numbers are those of the chain model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chain_model import SECOND_LOGPROB, SUCCESSOR_LOGPROB, THIRD_LOGPROB
from tests.support.server import LocalServer

CYCLE_100 = ("BCDA" * 25)[:100]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"top_p": 0.4}, id="C201-top-p-below-the-first-choice"),
        pytest.param({"top_k": 1}, id="C202-top-k-1"),
        pytest.param({"min_p": 0.5}, id="C203-min-p-above-the-second-choice"),
        pytest.param({"top_p": 0.4, "top_k": -1}, id="C216-unbounded-top-k"),
    ],
)
async def test_filters_leave_only_the_first_choice(server: LocalServer, sampling: dict[str, Any]) -> None:
    result = await server.generate("A", sampling={"temperature": 1.0, "max_new_tokens": 100, **sampling})
    assert result["text"] == CYCLE_100


@pytest.mark.parametrize(
    ("sampling", "expected", "finish"),
    [
        pytest.param({"logit_bias": {"126": 2}, "max_new_tokens": 3}, "~~~", "length", id="C205-logit-bias"),
        pytest.param({"presence_penalty": 2, "max_new_tokens": 10}, "BCDA~", "stop", id="C207-presence-penalty"),
        pytest.param({"repetition_penalty": 2, "max_new_tokens": 10}, "BCDA~", "stop", id="C209-repetition-penalty"),
    ],
)
async def test_changed_logits_change_the_choice(
    server: LocalServer, sampling: dict[str, Any], expected: str, finish: str
) -> None:
    result = await server.generate("A", sampling=sampling)
    assert (result["text"], result["meta_info"]["finish_reason"]["type"]) == (expected, finish)


async def test_output_logprobs_with_alternatives(server: LocalServer) -> None:
    """C210"""
    result = await server.generate("A", sampling={"max_new_tokens": 1}, return_logprob=True, top_logprobs_num=3)
    meta = result["meta_info"]
    assert meta["output_token_logprobs"] == [[pytest.approx(SUCCESSOR_LOGPROB, abs=1e-3), 66, None]]
    top = meta["output_top_logprobs"][0]
    assert [entry[1] for entry in top] == [66, 126, 94]
    expected = [SUCCESSOR_LOGPROB, SECOND_LOGPROB, THIRD_LOGPROB]
    assert [entry[0] for entry in top] == pytest.approx(expected, abs=1e-3)


async def test_prompt_logprobs(server: LocalServer) -> None:
    """C211"""
    result = await server.generate(
        "ABC",
        sampling={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        return_text_in_logprobs=True,
    )
    near = pytest.approx(SUCCESSOR_LOGPROB, abs=1e-3)
    assert result["meta_info"]["input_token_logprobs"] == [[None, 65, "A"], [near, 66, "B"], [near, 67, "C"]]


@pytest.mark.parametrize("start", [0, 16, 17, 32, 33])
async def test_prompt_logprobs_do_not_depend_on_the_cache(paged_server: LocalServer, start: int) -> None:
    """B08"""
    fields = {"return_logprob": True, "logprob_start_len": start, "sampling": {"max_new_tokens": 1}}
    ids = [65 + (start + position) % 20 for position in range(33)]
    first, second = [await paged_server.generate(input_ids=ids, **fields) for _ in range(2)]
    scored = [result["meta_info"]["input_token_logprobs"] for result in (first, second)]
    assert len(scored[0]) == len(ids) - start
    assert [entry[1] for entry in scored[0]] == ids[start:]
    for one, other in zip(*scored, strict=True):
        assert one[0] == (None if other[0] is None else pytest.approx(other[0], abs=1e-4))
    assert [entry[0] is None for entry in scored[0]] == [start == 0 and i == 0 for i in range(len(ids) - start)]
    assert first["text"] == second["text"]
    # What is scored is computed, so only whole pages in front of the first scored token come from the cache. The
    # log-probability of the token at ``start`` is told by the one before it.
    assert second["meta_info"]["cached_tokens"] == max(0, start - 1) // 16 * 16


async def test_extra_token_ids_are_scored(server: LocalServer) -> None:
    result = await server.generate(
        "A", sampling={"max_new_tokens": 1}, return_logprob=True, token_ids_logprob=[126, 66]
    )
    entries = result["meta_info"]["output_token_ids_logprobs"][0]
    assert [entry[1] for entry in entries] == [126, 66]
    assert [entry[0] for entry in entries] == pytest.approx([SECOND_LOGPROB, SUCCESSOR_LOGPROB], abs=1e-3)


async def test_completion_logprobs(server: LocalServer) -> None:
    """C213"""
    reply = await server.post("/v1/completions", {"prompt": "A", "max_tokens": 2, "temperature": 0, "logprobs": 2})
    logprobs = reply.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["B", "C"]
    assert logprobs["token_logprobs"] == pytest.approx([SUCCESSOR_LOGPROB] * 2, abs=1e-3)
    assert logprobs["text_offset"] == [0, 1]
    assert list(logprobs["top_logprobs"][1]) == ["C", "~"]
    assert list(logprobs["top_logprobs"][1].values()) == pytest.approx([SUCCESSOR_LOGPROB, SECOND_LOGPROB], abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(server: LocalServer, stream: bool) -> None:
    """C213, B07"""
    body = {
        "messages": [{"role": "user", "content": "A"}],
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": stream,
    }
    reply = await server.post("/v1/chat/completions", body)
    if stream:
        parts = [event["choices"][0]["logprobs"] for event in reply.events[:-1]]
        content = [entry for part in parts if part for entry in part["content"]]
    else:
        content = reply.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["B", "C", "D"]
    assert [entry["bytes"] for entry in content] == [[66], [67], [68]]
    assert [entry["logprob"] for entry in content] == pytest.approx([SUCCESSOR_LOGPROB] * 3, abs=1e-3)
    assert [[one["token"] for one in entry["top_logprobs"]] for entry in content] == [
        ["B", "~"],
        ["C", "~"],
        ["D", "~"],
    ]
    for entry in content:
        numbers = [one["logprob"] for one in entry["top_logprobs"]]
        assert numbers == pytest.approx([SUCCESSOR_LOGPROB, SECOND_LOGPROB], abs=1e-3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", 2),
        ("top_k", 0),
        ("top_k", -2),
        ("frequency_penalty", 3),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
    ],
)
async def test_parameters_out_of_range_are_named(server: LocalServer, name: str, value: Any) -> None:
    """C214"""
    reply = await server.post("/generate", {"text": "A", "sampling_params": {name: value}})
    assert reply.status == 400
    assert name in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e308, "min_new_tokens": 3},
        {"temperature": 1e39, "top_p": 1e-50},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 1e-300, "temperature": 1e-5, "logit_bias": {"66": 100}},
        {"temperature": 1e-6, "min_p": 1, "top_k": 2**62},
    ],
)
async def test_extreme_parameters_are_served(server: LocalServer, sampling: dict[str, Any]) -> None:
    reply = await server.post("/generate", {"text": "A", "sampling_params": {"max_new_tokens": 8, **sampling}})
    assert reply.status == 200, reply.text


async def test_seeded_choices_differ_and_repeat(server: LocalServer) -> None:
    body = {"prompt": "A", "max_tokens": 20, "temperature": 2.0, "seed": 7, "n": 3, "ignore_eos": True}
    first, second = [
        [choice["text"] for choice in (await server.post("/v1/completions", body)).json()["choices"]] for _ in range(2)
    ]
    assert first == second
    assert len(set(first)) == 3
