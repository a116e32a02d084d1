"""Sampling parameters and token ids from untrusted JSON.

Everything a client can get wrong is a ``RequestError`` with status 400 that names the field and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sglang_lite.frontend.fields import (
    describe,
    read_bool,
    read_float,
    read_int,
    read_ints,
    read_object,
    read_str,
    read_strings,
    shorten,
    wrong_type,
)
from sglang_lite.frontend.request_limits import LIMITS, check_entries
from sglang_lite.frontend.stop import MAX_STOP_LENGTH, MAX_STOPS, compile_stop_patterns
from sglang_lite.types import Grammar, GrammarKind, RequestError, SamplingParams

MAX_SAMPLES = LIMITS.choices
"""Largest ``n``."""
GREEDY_TEMPERATURE = 1e-6
"""Temperatures below this one mean greedy."""
_HIGHEST_TEMPERATURE = 1e30
_LOWEST_PENALTY = 1e-9
_MOST_TOKENS = 2**31 - 1
"""More than any context has; counts of tokens are 32-bit numbers in the engine."""

_READERS: dict[str, Callable[[str, object], Any]] = {
    "max_new_tokens": read_int,
    "min_new_tokens": read_int,
    "temperature": read_float,
    "top_p": read_float,
    "top_k": read_int,
    "min_p": read_float,
    "frequency_penalty": read_float,
    "presence_penalty": read_float,
    "repetition_penalty": read_float,
    "stop": read_strings,
    "stop_token_ids": read_ints,
    "stop_regex": read_strings,
    "ignore_eos": read_bool,
    "skip_special_tokens": read_bool,
    "spaces_between_special_tokens": read_bool,
    "no_stop_trim": read_bool,
    "n": read_int,
    "logit_bias": read_object,
    "sampling_seed": read_int,
    "stream_interval": read_int,
}
_ALIASES = {"seed": "sampling_seed"}
_CONSTRAINTS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")
_ABSENT_FEATURES = ("choice", "custom_params", "watermark")
_KNOWN = (*_READERS, "stop_token_id", "seed", *_CONSTRAINTS, *_ABSENT_FEATURES, "beam_width")


def parse_sampling_params(
    raw: object,
    *,
    vocab_size: int | None = None,
    defaults: Mapping[str, Any] | None = None,
    allow_zero_tokens: bool = False,
) -> SamplingParams:
    """Read the ``sampling_params`` object of a native request.

    Args:
        raw: decoded JSON; None and {} mean the defaults. A null value means the default of its key.
        vocab_size: for checks of token ids; None leaves the upper limit open.
        defaults: values for keys that the request leaves out (``--preferred-sampling-params``), same keys.
        allow_zero_tokens: whether ``max_new_tokens`` may be 0 (prefill only).
    Raises:
        RequestError: 400, or 501 for a parameter of a feature that is not built in.
    """
    if raw is None:
        raw = {}
    given = read_object("sampling_params", raw)
    for key in given:
        if key not in _KNOWN:
            names = ", ".join(f"`{name}`" for name in _KNOWN)
            raise RequestError(f"unknown field `{shorten(key)}`, expected one of {names}", field="sampling_params")
    merged = {**(defaults or {}), **{key: value for key, value in given.items() if value is not None}}
    # An explicit null is "up to the limit" for this key alone.
    unlimited = "max_new_tokens" in given and given["max_new_tokens"] is None
    return _build(merged, vocab_size=vocab_size, unlimited=unlimited, allow_zero_tokens=allow_zero_tokens)


def _build(
    values: Mapping[str, Any], *, vocab_size: int | None, unlimited: bool, allow_zero_tokens: bool
) -> SamplingParams:
    grammar = _read_grammar(values)
    _refuse_absent_features(values)
    read: dict[str, Any] = {}
    for key, value in values.items():
        name = _ALIASES.get(key, key)
        reader = _READERS.get(name)
        if reader is not None and value is not None:
            read[name] = reader(key, value)
    if unlimited:
        read["max_new_tokens"] = None
    _check_lengths(read, allow_zero_tokens=allow_zero_tokens)
    _check_ranges(read)
    _check_stops(read)
    single = values.get("stop_token_id")
    if single is not None:
        read["stop_token_ids"] = (*read.get("stop_token_ids", ()), read_int("stop_token_id", single))
    if "stop_token_ids" in read:
        check_entries("stop_token_ids", read["stop_token_ids"], LIMITS.stop_token_ids)
        check_token_ids("stop_token_ids", read["stop_token_ids"], vocab_size)
        read["stop_token_ids"] = tuple(sorted(set(read["stop_token_ids"])))
    if "logit_bias" in read:
        read["logit_bias"] = _read_logit_bias(read["logit_bias"], vocab_size)
    if "sampling_seed" in read:
        # Negative seeds are valid input; the engine's column keeps -1 for "none".
        read["seed"] = read.pop("sampling_seed") % 2**63
    if "temperature" in read:
        # The engine's numbers have 32 bits. Above their range, every token is equally likely long since.
        read["temperature"] = min(read["temperature"], _HIGHEST_TEMPERATURE)
        if read["temperature"] < GREEDY_TEMPERATURE:
            read["temperature"] = 0.0
    if "repetition_penalty" in read:
        # Smaller ones make infinities of 32-bit logits, whose difference is no number.
        read["repetition_penalty"] = max(read["repetition_penalty"], _LOWEST_PENALTY)
    return SamplingParams(**read, grammar=grammar)


def _read_grammar(values: Mapping[str, Any]) -> Grammar | None:
    """The one constraint of the output, if there is any; the empty text is none."""
    constraints = [name for name in _CONSTRAINTS if values.get(name) not in (None, "")]
    if len(constraints) > 1:
        raise RequestError("Only one of json_schema, regex, ebnf, or structural_tag can be set.", field=constraints[1])
    return Grammar(constraints[0], read_str(constraints[0], values[constraints[0]])) if constraints else None


def _refuse_absent_features(values: Mapping[str, Any]) -> None:
    beam_width = values.get("beam_width")
    if beam_width is not None and read_int("beam_width", beam_width) < 1:
        raise RequestError(f"beam_width must be at least 1, got {beam_width}.", field="beam_width")
    absent = [name for name in _ABSENT_FEATURES if values.get(name) not in (None, [], {})]
    if beam_width is not None and beam_width > 1:
        absent.append("beam_width")
    if absent:
        raise RequestError(
            f"{absent[0]} is not supported by this server; leave it out of the request", status=501, field=absent[0]
        )


def _check_lengths(read: Mapping[str, Any], *, allow_zero_tokens: bool) -> None:
    limit = read.get("max_new_tokens", SamplingParams().max_new_tokens)
    lowest = 0 if allow_zero_tokens else 1
    if limit is not None and limit < lowest:
        raise RequestError(f"max_new_tokens must be at least {lowest}, got {limit}.", field="max_new_tokens")
    minimum = read.get("min_new_tokens", 0)
    most = _MOST_TOKENS if limit is None else limit
    if not 0 <= minimum <= most:
        bound = str(most) if limit is None else f"max_new_tokens({limit})"
        raise RequestError(f"min_new_tokens must be in [0, {bound}], got {minimum}.", field="min_new_tokens")


def _check_ranges(read: Mapping[str, Any]) -> None:
    def refuse(name: str, rule: str) -> None:
        raise RequestError(f"{name} must be {rule}, got {read[name]}.", field=name)

    temperature = read.get("temperature", 1.0)
    if not math.isfinite(temperature) or temperature < 0:
        refuse("temperature", "a non-negative finite number")
    if not 0 < read.get("top_p", 1.0) <= 1:
        refuse("top_p", "in (0, 1]")
    top_k = read.get("top_k", -1)
    if top_k != -1 and top_k < 1:
        refuse("top_k", "-1 (disable) or at least 1")
    if not 0 <= read.get("min_p", 0.0) <= 1:
        refuse("min_p", "in [0, 1]")
    for name in ("frequency_penalty", "presence_penalty"):
        if not -2 <= read.get(name, 0.0) <= 2:
            refuse(name, "in [-2, 2]")
    if not 0 < read.get("repetition_penalty", 1.0) <= 2:
        refuse("repetition_penalty", "in (0, 2] (1.0 = no penalty)")
    if not 1 <= read.get("n", 1) <= MAX_SAMPLES:
        refuse("n", f"in [1, {MAX_SAMPLES}]")
    if read.get("stream_interval", 1) < 1:
        refuse("stream_interval", "at least 1")


def _check_stops(read: Mapping[str, Any]) -> None:
    stops = read.get("stop", ())
    if len(stops) > MAX_STOPS:
        raise RequestError(f"at most {MAX_STOPS} stop strings are allowed, got {len(stops)}", field="stop")
    for stop in stops:
        if not stop:
            raise RequestError("stop must not contain an empty string; leave it out to set no stop", field="stop")
    length = sum(map(len, stops))
    if length > MAX_STOP_LENGTH:
        raise RequestError(f"stop holds {length} characters in all, over the limit of {MAX_STOP_LENGTH}", field="stop")
    patterns = read.get("stop_regex", ())
    if len(patterns) > MAX_STOPS:
        raise RequestError(
            f"at most {MAX_STOPS} stop_regex patterns are allowed, got {len(patterns)}", field="stop_regex"
        )
    for pattern in patterns:
        if not pattern:
            raise RequestError("stop_regex must not contain an empty pattern", field="stop_regex")
    compile_stop_patterns(patterns)


def _read_logit_bias(raw: Mapping[Any, Any], vocab_size: int | None) -> dict[int, float]:
    check_entries("logit_bias", raw, LIMITS.logit_biases)
    allowed = "non-negative token ids" if vocab_size is None else f"[0, {vocab_size - 1}]"
    biases: dict[int, float] = {}
    for name, value in raw.items():
        key = str(name)  # JSON has string keys only; callers in Python may use numbers
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) <= 19 else -1
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            raise RequestError(f"logit_bias must has keys in {allowed}, got {shorten(key)}.", field="logit_bias")
        bias = read_float(f"logit_bias[{token_id}]", value)
        if not -100 <= bias <= 100:
            raise RequestError(
                f"logit_bias values must be in [-100, 100], got {bias} for token {token_id}.", field="logit_bias"
            )
        biases[token_id] = bias
    return biases


def check_token_ids(field: str, token_ids: tuple[int, ...] | list[int], vocab_size: int | None) -> None:
    """Refuse ids outside the vocabulary."""
    if not token_ids:
        return
    upper = 2**31 - 1 if vocab_size is None else vocab_size - 1
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest > upper:
        wrong = lowest if lowest < 0 else highest
        raise RequestError(f"{field} must be token ids in [0, {upper}], got {shorten(wrong)}.", field=field)


def parse_token_ids(raw: object, *, vocab_size: int | None, field: str = "input_ids") -> list[int]:
    """Read one prompt given as token ids. Cost per id is that of a C loop.

    Raises:
        RequestError: not a list, empty, an element that is not an integer, or an id outside the vocabulary.
    """
    if not isinstance(raw, list):
        wrong_type(field, raw, "a sequence of i64")
    if not raw:
        raise RequestError(f"{field} cannot be empty.", field=field)
    if set(map(type, raw)) != {int}:
        wrong = next(item for item in raw if type(item) is not int)
        raise RequestError(f"{field}: invalid type: {describe(wrong)}, expected i64", field=field)
    check_token_ids(field, raw, vocab_size)
    return raw


def parse_token_ids_logprob(raw: object, *, vocab_size: int | None) -> tuple[int, ...]:
    """Read ``token_ids_logprob``; null is none."""
    if raw is None:
        return ()
    token_ids = read_ints("token_ids_logprob", raw)
    check_entries("token_ids_logprob", token_ids, LIMITS.scored_token_ids)
    check_token_ids("token_ids_logprob", token_ids, vocab_size)
    return token_ids
