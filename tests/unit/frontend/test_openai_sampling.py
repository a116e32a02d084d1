"""Sampling parameters of the OpenAI endpoints."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_lite.frontend.openai_sampling import chat_sampling, completion_sampling, default_sampling
from sglang_lite.types import RequestError, SamplingParams


def test_completion_defaults() -> None:
    assert completion_sampling({"prompt": "x"}) == SamplingParams(max_new_tokens=16)


def test_chat_defaults() -> None:
    assert chat_sampling({"messages": []}) == SamplingParams(max_new_tokens=None)


def test_the_newer_limit_wins() -> None:
    assert chat_sampling({"max_tokens": 2, "max_completion_tokens": 3}).max_new_tokens == 3
    assert chat_sampling({"max_tokens": 2, "max_completion_tokens": None}).max_new_tokens == 2


def test_fields() -> None:
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "stop": ["a", "b"],
        "seed": 7,
        "logit_bias": {"5": -3},
        "presence_penalty": 1,
        "frequency_penalty": None,
        "min_tokens": 4,
        "top_k": 3,
        "stop_token_ids": [9],
        "no_stop_trim": True,
        "ignore_eos": True,
        "user": "ignored",
    }
    params = chat_sampling(body, vocab_size=10)
    assert params == SamplingParams(
        max_new_tokens=None,
        min_new_tokens=4,
        temperature=0.5,
        top_p=0.9,
        n=2,
        stop=("a", "b"),
        seed=7,
        logit_bias={5: -3.0},
        presence_penalty=1.0,
        top_k=3,
        stop_token_ids=(9,),
        no_stop_trim=True,
        ignore_eos=True,
    )


def test_nothing_generated_only_with_echo() -> None:
    assert completion_sampling({"max_tokens": 0, "echo": True}).max_new_tokens == 0
    with pytest.raises(RequestError, match="max_tokens must be positive") as caught:
        completion_sampling({"max_tokens": 0})
    assert caught.value.field == "max_tokens"


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be positive, got 0"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens must be positive"),
        ({"max_tokens": "x"}, "max_tokens", "expected i64"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "min_tokens must be in [0, max_tokens(5)], got 6."),
        ({"min_tokens": 1.5}, "min_tokens", "min_tokens: invalid type"),
        ({"temperature": -1}, "temperature", "temperature must be"),
        ({"logit_bias": {"50": 1}}, "logit_bias", "[0, 9]"),
        ({"n": 0}, "n", "n must be in"),
        ({"stop": 5}, "stop", "stop: invalid type"),
    ],
)
def test_refusals_use_the_names_of_the_endpoint(body: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_sampling(body, vocab_size=10)
    assert (caught.value.status, caught.value.field) == (400, field)
    assert message in caught.value.message


def test_model_defaults() -> None:
    config = {"temperature": 0.6, "top_k": 0, "top_p": 0.95, "do_sample": True, "eos_token_id": 2, "min_p": "x"}
    defaults = default_sampling(config, {"top_p": 0.5})
    assert defaults == {"temperature": 0.6, "top_p": 0.5}
    assert default_sampling({"temperature": -1, "top_p": 0, "min_p": "x", "repetition_penalty": 1.1}) == {
        "repetition_penalty": 1.1
    }
    params = chat_sampling({"temperature": 0.1}, defaults=defaults)
    assert (params.temperature, params.top_p) == (0.1, 0.5)
