"""Sampling parameters and token ids from JSON: every bad value is a 400 that names its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sglang_lite.frontend.validation import parse_sampling_params, parse_token_ids, parse_token_ids_logprob
from sglang_lite.types import Grammar, GrammarKind, RequestError, SamplingParams

VOCABULARY = 260


def refusal(raw: Any, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_sampling_params(raw, vocab_size=VOCABULARY, **options)
    return caught.value


@pytest.mark.parametrize("raw", [None, {}, {"temperature": None, "stop": None, "n": None}])
def test_defaults(raw: Any) -> None:
    assert parse_sampling_params(raw) == SamplingParams()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temperature", -1, "temperature must be a non-negative finite number, got -1.0."),
        ("temperature", math.nan, "temperature must be a non-negative finite number, got nan."),
        ("temperature", math.inf, "temperature must be a non-negative finite number, got inf."),
        ("temperature", 10**400, "temperature is too large a number"),
        ("top_p", 0, "top_p must be in (0, 1], got 0.0."),
        ("top_p", 1.5, "top_p must be in (0, 1], got 1.5."),
        ("top_p", math.nan, "top_p must be in (0, 1], got nan."),
        ("min_p", 2, "min_p must be in [0, 1], got 2.0."),
        ("min_p", -0.1, "min_p must be in [0, 1], got -0.1."),
        ("top_k", 0, "top_k must be -1 (disable) or at least 1, got 0."),
        ("top_k", -2, "top_k must be -1 (disable) or at least 1, got -2."),
        ("frequency_penalty", 3, "frequency_penalty must be in [-2, 2], got 3.0."),
        ("presence_penalty", -2.5, "presence_penalty must be in [-2, 2], got -2.5."),
        ("repetition_penalty", 0, "repetition_penalty must be in (0, 2] (1.0 = no penalty), got 0.0."),
        ("max_new_tokens", 0, "max_new_tokens must be at least 1, got 0."),
        ("max_new_tokens", -1, "max_new_tokens must be at least 1, got -1."),
        ("min_new_tokens", -1, "min_new_tokens must be in [0, max_new_tokens(128)], got -1."),
        ("min_new_tokens", 129, "min_new_tokens must be in [0, max_new_tokens(128)], got 129."),
        ("n", 0, "n must be in [1, 256], got 0."),
        ("n", 10**9, "n must be in [1, 256], got 1000000000."),
        ("stream_interval", 0, "stream_interval must be at least 1, got 0."),
        ("stop", ["x"] * 33, "at most 32 stop strings are allowed, got 33"),
        ("stop", "", "stop must not contain an empty string"),
        ("stop", ["a" * 9000], "stop holds 9000 characters in all"),
        ("stop", ["ab" * 300] * 20, "stop holds 12000 characters in all"),
        ("stop_regex", ["a"] * 33, "at most 32 stop_regex patterns are allowed, got 33"),
        ("stop_regex", "(", "stop_regex '(' is not a valid RE2 pattern"),
        ("stop_token_ids", [10**9], "stop_token_ids must be token ids in [0, 259], got 1000000000."),
        ("stop_token_ids", [-3], "stop_token_ids must be token ids in [0, 259], got -3."),
        ("stop_token_id", 260, "stop_token_ids must be token ids in [0, 259], got 260."),
        ("logit_bias", {"-1": 5}, "logit_bias must has keys in [0, 259], got -1."),
        ("logit_bias", {"999999": 5}, "logit_bias must has keys in [0, 259], got 999999."),
        ("logit_bias", {"abc": 1}, "logit_bias must has keys in [0, 259], got abc."),
        ("logit_bias", {"5": 1e9}, "logit_bias values must be in [-100, 100], got 1000000000.0 for token 5."),
        ("logit_bias", {"5": math.nan}, "logit_bias values must be in [-100, 100]"),
        ("seed", 2**63, "seed must be a 64-bit integer"),
        ("seed", 10**100, "seed must be a 64-bit integer"),
        ("beam_width", 0, "beam_width must be at least 1, got 0."),
    ],
)
def test_ranges(key: str, value: Any, message: str) -> None:
    error = refusal({key: value})
    assert message in error.message
    assert error.status == 400
    assert error.field is not None
    assert error.field.split("[")[0] in (key, "stop_token_ids", "sampling_seed")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temperature", "x", 'invalid type: string "x", expected f64'),
        ("temperature", True, "invalid type: boolean `true`, expected f64"),
        ("max_new_tokens", 1.5, "invalid type: floating point `1.5`, expected i64"),
        ("max_new_tokens", True, "invalid type: boolean `true`, expected i64"),
        ("top_k", [], "invalid type: sequence, expected i64"),
        ("stop_token_ids", [None, 1], "invalid type: null, expected i64"),
        ("stop_token_ids", 5, "invalid type: integer `5`, expected a sequence of i64"),
        ("stop", 5, "invalid type: integer `5`, expected a value or an array of values for StringOrList"),
        ("stop", [5], "invalid type: integer `5`, expected a string"),
        ("ignore_eos", "yes", 'invalid type: string "yes", expected a boolean'),
        ("no_stop_trim", 1, "invalid type: integer `1`, expected a boolean"),
        ("logit_bias", [1], "invalid type: sequence, expected a map"),
        ("logit_bias", {"5": "x"}, 'invalid type: string "x", expected f64'),
        ("sampling_seed", 1.0, "invalid type: floating point `1.0`, expected i64"),
    ],
)
def test_types(key: str, value: Any, message: str) -> None:
    error = refusal({key: value})
    assert message in error.message
    assert key in error.message
    assert error.status == 400


@pytest.mark.parametrize("raw", [[], "x", 5, True])
def test_not_an_object(raw: Any) -> None:
    assert "expected a map" in refusal(raw).message


def test_unknown_key_lists_the_known_ones() -> None:
    error = refusal({"bogus" * 100: 1})
    assert error.message.startswith("unknown field `bogus")
    assert "expected one of `max_new_tokens`, " in error.message
    assert len(error.message) < 1500


def test_values() -> None:
    params = parse_sampling_params(
        {
            "max_new_tokens": None,
            "min_new_tokens": 500,
            "temperature": 1,
            "top_k": 5,
            "stop": "END",
            "stop_regex": ["a+"],
            "stop_token_ids": [9, 3, 9],
            "stop_token_id": 5,
            "logit_bias": {"126": 2, "0": -100},
            "sampling_seed": -1,
            "skip_special_tokens": False,
            "beam_width": 1,
            "regex": "",
            "choice": [],
        },
        vocab_size=VOCABULARY,
    )
    assert params.max_new_tokens is None
    assert params.min_new_tokens == 500
    assert params.temperature == 1.0
    assert params.stop == ("END",)
    assert params.stop_regex == ("a+",)
    assert params.stop_token_ids == (3, 5, 9)
    assert params.logit_bias == {126: 2.0, 0: -100.0}
    assert params.seed == 2**63 - 1
    assert not params.skip_special_tokens


def test_python_forms() -> None:
    """Callers of the offline engine use tuples and numeric keys."""
    params = parse_sampling_params(
        {"stop": ("a", "b"), "stop_token_ids": (4,), "logit_bias": {126: 2}}, vocab_size=VOCABULARY
    )
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a", "b"), (4,), {126: 2.0})


def test_messages_are_always_encodable() -> None:
    error = refusal({"\ud800": 1})
    assert error.message.encode().startswith(b"unknown field `\\ud800`")
    assert refusal({"temperature": "\ud800"}).message.encode()
    assert refusal({"logit_bias": {"\ud800": 1}}).message.encode()


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-7])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    assert parse_sampling_params({"temperature": temperature}).temperature == 0.0


def test_prompt_only_has_to_be_allowed() -> None:
    assert parse_sampling_params({"max_new_tokens": 0}, allow_zero_tokens=True).max_new_tokens == 0
    assert "at least 0" in refusal({"max_new_tokens": -1}, allow_zero_tokens=True).message


@pytest.mark.parametrize("key", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_constraints_are_texts(key: GrammarKind) -> None:
    assert parse_sampling_params({key: "x y"}).grammar == Grammar(key, "x y")
    assert parse_sampling_params({key: ""}).grammar is None
    assert "expected a string" in refusal({key: 5}).message


def test_one_constraint_at_most() -> None:
    error = refusal({"regex": "x", "ebnf": "y"})
    assert error.message == "Only one of json_schema, regex, ebnf, or structural_tag can be set."


def test_preferred_values_stand_in_for_absent_ones() -> None:
    preferred = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 7}
    params = parse_sampling_params({"top_p": 0.8, "temperature": None}, defaults=preferred)
    assert (params.temperature, params.top_p, params.max_new_tokens) == (0.5, 0.8, 7)
    assert parse_sampling_params({"max_new_tokens": None}, defaults=preferred).max_new_tokens is None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([-1], "input_ids must be token ids in [0, 259], got -1."),
        ([2**31], "input_ids must be token ids in [0, 259], got 2147483648."),
        ([VOCABULARY], "input_ids must be token ids in [0, 259], got 260."),
        ([10**100], "a number of more than 77 digits"),
        ([1.5], "input_ids: invalid type: floating point `1.5`, expected i64"),
        ([1, True], "input_ids: invalid type: boolean `true`, expected i64"),
        ([1, None], "input_ids: invalid type: null, expected i64"),
        ([[1]], "input_ids: invalid type: sequence, expected i64"),
        ([], "input_ids cannot be empty."),
        ("x", 'input_ids: invalid type: string "x", expected a sequence of i64'),
        ({}, "input_ids: invalid type: map, expected a sequence of i64"),
    ],
)
def test_bad_token_ids(raw: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_token_ids(raw, vocab_size=VOCABULARY)
    assert message in caught.value.message
    assert (caught.value.status, caught.value.field) == (400, "input_ids")


def test_token_ids() -> None:
    assert parse_token_ids([0, 259], vocab_size=VOCABULARY) == [0, 259]
    assert parse_token_ids([2**31 - 1], vocab_size=None) == [2**31 - 1]
    with pytest.raises(RequestError, match=r"\[0, 2147483647\]"):
        parse_token_ids([2**31], vocab_size=None)


def test_token_ids_logprob() -> None:
    assert parse_token_ids_logprob(None, vocab_size=VOCABULARY) == ()
    assert parse_token_ids_logprob([3, 1], vocab_size=VOCABULARY) == (3, 1)
    for wrong in ([-3], [260], [[0]], "x", [1.0]):
        with pytest.raises(RequestError, match="token_ids_logprob"):
            parse_token_ids_logprob(wrong, vocab_size=VOCABULARY)
