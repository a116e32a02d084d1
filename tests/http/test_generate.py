"""Native generation: text, stops, finish reasons (acceptance section 2)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server import LocalServer, greedy

CYCLE = [66, 67, 68, 65]


@pytest.mark.parametrize("prompt", [{"text": "A"}, {"input_ids": [65]}], ids=["C101-text", "C119-ids"])
async def test_length_limit_ends_generation(server: LocalServer, prompt: dict[str, Any]) -> None:
    result = await server.generate(**prompt, sampling={"max_new_tokens": 10})
    assert result["text"] == "BCDABCDABC"
    assert result["output_ids"] == [66, 67, 68, 65, 66, 67, 68, 65, 66, 67]
    meta = result["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (1, 10)
    assert meta["finish_reason"] == {"type": "length", "length": 10}
    assert meta["e2e_latency"] > 0


@pytest.mark.parametrize(
    ("text", "sampling", "expected", "finish", "count"),
    [
        pytest.param("0", {}, "123456789", {"type": "stop", "matched": 258}, 10, id="C102-end-token-is-not-shown"),
        pytest.param("A", {"stop": "CD"}, "B", {"type": "stop", "matched": "CD"}, 3, id="C104-stop-string"),
        pytest.param(
            "A", {"stop": ["ZZ", "DA"]}, "BC", {"type": "stop", "matched": "DA"}, 4, id="C105-second-stop-string"
        ),
        pytest.param("A", {"stop_token_ids": [68]}, "BC", {"type": "stop", "matched": 68}, 3, id="C108-stop-token"),
        pytest.param(
            "A",
            {"stop_token_ids": [68], "no_stop_trim": True},
            "BCD",
            {"type": "stop", "matched": 68},
            3,
            id="C109-stop-token-kept",
        ),
        pytest.param("A", {"stop_regex": "C.A"}, "BCDA", {"type": "stop", "matched": "C.A"}, 4, id="C110-stop-pattern"),
        pytest.param(
            "0",
            {"min_new_tokens": 12, "max_new_tokens": 30},
            "123456789~~~",
            {"type": "stop", "matched": 258},
            13,
            id="C113-minimum-length",
        ),
        pytest.param("a", {}, "é🙂!", {"type": "stop", "matched": 258}, 8, id="C114-characters-of-several-tokens"),
        pytest.param("hello", {}, "", {"type": "stop", "matched": 258}, 1, id="C122-end-token-at-once"),
        pytest.param(
            "G", {"skip_special_tokens": False}, "g", {"type": "stop", "matched": 258}, 2, id="C126-end-token-is-cut"
        ),
        pytest.param(
            "G",
            {"skip_special_tokens": False, "no_stop_trim": True},
            "g<|eos|>",
            {"type": "stop", "matched": 258},
            2,
            id="C126-end-token-kept-when-asked",
        ),
        pytest.param(
            "A", {"max_new_tokens": None, "stop": "DAB"}, "BC", {"type": "stop", "matched": "DAB"}, 5, id="no-limit"
        ),
    ],
)
async def test_generation_stops(
    server: LocalServer, text: str, sampling: dict[str, Any], expected: str, finish: dict[str, Any], count: int
) -> None:
    result = await server.generate(text, sampling=sampling)
    assert result["text"] == expected
    assert result["meta_info"]["finish_reason"] == finish
    assert result["meta_info"]["completion_tokens"] == count == len(result["output_ids"])


async def test_stop_token_ends_the_ids(server: LocalServer) -> None:
    """C108"""
    result = await server.generate("A", sampling={"stop_token_ids": [68]})
    assert result["output_ids"] == [66, 67, 68]


async def test_ignore_eos_runs_to_the_limit(server: LocalServer) -> None:
    """C111"""
    result = await server.generate("0", sampling={"ignore_eos": True, "max_new_tokens": 12})
    assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert result["text"].startswith("123456789")
    assert result["meta_info"]["completion_tokens"] == 12


async def test_default_limit_is_128_tokens(server: LocalServer) -> None:
    """C982"""
    result = await server.generate("A")
    assert result["meta_info"]["completion_tokens"] == 128


async def test_batch_keeps_order(server: LocalServer) -> None:
    """C120"""
    results = await server.generate(["A", "0", "G"], sampling={"max_new_tokens": 4})
    assert [result["text"] for result in results] == ["BCDA", "1234", "g"]


async def test_batch_of_ids_with_parameters_for_each(server: LocalServer) -> None:
    """C121"""
    parameters = [{"max_new_tokens": count, "temperature": 0} for count in (1, 2, 3)]
    reply = await server.post("/generate", {"input_ids": [[65], [48], [112]], "sampling_params": parameters})
    assert [result["text"] for result in reply.json()] == ["B", "12", "qXXr"]


async def test_batch_of_one_is_a_list(server: LocalServer) -> None:
    results = await server.generate(["A"], sampling={"max_new_tokens": 1})
    assert [result["text"] for result in results] == ["B"]


async def test_several_samples_are_prompt_major(server: LocalServer) -> None:
    results = await server.generate(["A", "0"], sampling={"max_new_tokens": 2, "n": 2}, rid="many")
    assert [result["text"] for result in results] == ["BC", "BC", "12", "12"]
    assert len({result["meta_info"]["id"] for result in results}) == 4


async def test_request_id_is_the_callers_or_new(server: LocalServer) -> None:
    """C123"""
    given = await server.generate("G", rid="my-1")
    assert given["meta_info"]["id"] == "my-1"
    made = [(await server.generate("G"))["meta_info"]["id"] for _ in range(2)]
    assert all(made) and made[0] != made[1]


async def test_batch_request_ids(server: LocalServer) -> None:
    named = await server.generate(["A", "0"], rid=["x", "y"], sampling={"max_new_tokens": 1})
    assert [result["meta_info"]["id"] for result in named] == ["x", "y"]
    numbered = await server.generate(["A", "0"], rid="x", sampling={"max_new_tokens": 1})
    assert [result["meta_info"]["id"] for result in numbered] == ["x_0", "x_1"]


async def test_put_works_like_post(server: LocalServer) -> None:
    reply = await server.call("PUT", "/generate", greedy("A", {"max_new_tokens": 1}))
    assert reply.json()["text"] == "B"


async def test_same_prompt_again_gives_the_same_ids(server: LocalServer) -> None:
    """C125"""
    prompt = "cold and then warm A"
    first, second = [await server.generate(prompt, sampling={"max_new_tokens": 30}) for _ in range(2)]
    assert first["output_ids"] == second["output_ids"]
    assert first["meta_info"]["cached_tokens"] < second["meta_info"]["cached_tokens"]


async def test_prompt_ids_are_returned_when_asked(server: LocalServer) -> None:
    result = await server.generate("AXX", return_prompt_token_ids=True, sampling={"max_new_tokens": 1})
    assert result["prompt_token_ids"] == [65, 256]


async def test_cache_salt_separates_prompts(server: LocalServer) -> None:
    prompt = "salted prompt of some length A"
    sampling = {"max_new_tokens": 1}
    await server.generate(prompt, sampling=sampling)
    other = await server.generate(prompt, sampling=sampling, cache_salt="tenant-2")
    same = await server.generate(prompt, sampling=sampling)
    assert other["meta_info"]["cached_tokens"] == 0
    assert same["meta_info"]["cached_tokens"] > 0
