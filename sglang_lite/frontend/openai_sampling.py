"""Sampling parameters from the bodies of the OpenAI endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_lite.frontend.fields import read_int
from sglang_lite.frontend.response_format import response_constraint
from sglang_lite.frontend.validation import parse_sampling_params
from sglang_lite.types import RequestError, SamplingParams

COMPLETION_MAX_TOKENS = 16

_SAME_NAME = frozenset(
    (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "stop",
        "stop_token_ids",
        "stop_regex",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "n",
        "logit_bias",
        "seed",
        "stream_interval",
        "regex",
        "ebnf",
        "json_schema",
        "custom_params",
        "watermark",
    )
)


def completion_sampling(
    body: Mapping[str, Any], *, vocab_size: int | None = None, defaults: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Parameters of a /v1/completions body: 16 tokens unless said, 0 only together with ``echo``."""
    values = _shared(body)
    limit = body.get("max_tokens")
    count = COMPLETION_MAX_TOKENS if limit is None else read_int("max_tokens", limit)
    if count < 0 or (count == 0 and not body.get("echo")):
        raise RequestError(f"max_tokens must be positive, got {count} (0 is allowed with echo)", field="max_tokens")
    values["max_new_tokens"] = count
    return _convert(values, "max_tokens", vocab_size, defaults)


def chat_sampling(
    body: Mapping[str, Any], *, vocab_size: int | None = None, defaults: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Parameters of a /v1/chat/completions body: up to the context limit unless said.

    ``max_completion_tokens`` wins over ``max_tokens``. ``defaults`` are the model's own (generation_config.json).
    """
    values = _shared(body)
    name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    limit = body.get(name)
    if limit is not None and read_int(name, limit) < 1:
        raise RequestError(f"{name} must be positive, got {limit}", field=name)
    values["max_new_tokens"] = limit
    return _convert(values, name, vocab_size, defaults)


def _shared(body: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in body.items() if value is not None and name in _SAME_NAME}
    if body.get("min_tokens") is not None:
        values["min_new_tokens"] = read_int("min_tokens", body["min_tokens"])
    constraint = response_constraint(body)
    for name in constraint.keys() & values.keys():
        raise RequestError(f"response_format and {name} cannot both be set", field="response_format")
    return {**values, **constraint}


def _convert(
    values: dict[str, Any], limit_name: str, vocab_size: int | None, defaults: Mapping[str, Any] | None
) -> SamplingParams:
    try:
        return parse_sampling_params(values, vocab_size=vocab_size, defaults=defaults, allow_zero_tokens=True)
    except RequestError as error:
        # The native names of the two length fields differ from those of these endpoints.
        names = {"min_new_tokens": "min_tokens", "max_new_tokens": limit_name}
        if error.field not in names:
            raise
        message = error.message.replace("min_new_tokens", "min_tokens").replace("max_new_tokens", limit_name)
        raise RequestError(message, status=error.status, field=names[error.field]) from error


def default_sampling(
    generation_config: Mapping[str, Any], preferred: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Defaults of a server: what generation_config.json recommends, overruled by --preferred-sampling-params.

    Pass an empty ``generation_config`` for ``--sampling-defaults openai`` and for the native endpoint.
    Values that cannot be used (Hugging Face writes ``top_k: 0`` for "no limit") mean the ordinary default.
    """
    values: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = generation_config.get(name)
        if value is not None and _is_usable(name, value):
            values[name] = value
    return {**values, **(preferred or {})}


def _is_usable(name: str, value: object) -> bool:
    try:
        parse_sampling_params({name: value})
    except RequestError:
        return False
    return True
