"""From the arguments of ``Engine.generate`` to the sequences of the call."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.frontend.request_ids import RequestIds
from sglang_lite.frontend.validation import parse_sampling_params, parse_token_ids
from sglang_lite.types import RequestError, SamplingParams

SamplingInput = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None

_IDS = RequestIds()


@dataclass(slots=True, frozen=True, kw_only=True)
class CallOptions:
    """What one call asks for beside its prompts.

    Attributes:
        sampling: one mapping for all prompts or one for each, under SGLang's names.
        lora_path: name of the adapter of all prompts, or one name (or None) for each.
        defaults: parameters that a prompt's mapping leaves out.
        vocab_size: of the model, for checks of token ids.
    """

    vocab_size: int
    sampling: SamplingInput = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    lora_path: str | Sequence[str | None] | None = None


def build_requests(
    prompt: str | Sequence[str] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    options: CallOptions,
) -> tuple[list[GenerateRequest], bool]:
    """The sequences of a call, prompt-major, and whether the result is a list.

    Raises:
        RequestError: there is not exactly one prompt source, or a parameter is wrong.
    """
    prompts, is_batch = _prompts(prompt, input_ids, options.vocab_size)
    samplings = list(_samplings(options, len(prompts)))
    requests = [
        _request(source, params, adapter, options)
        for source, params, adapter in zip(prompts, samplings, _adapters(options, len(prompts)), strict=True)
        for _ in range(params.n)
    ]
    return requests, is_batch or any(params.n > 1 for params in samplings)


def _request(
    source: str | list[int], params: SamplingParams, adapter: str | None, options: CallOptions
) -> GenerateRequest:
    return GenerateRequest(
        request_id=_IDS.make(time.time_ns()),
        text=source if isinstance(source, str) else None,
        input_ids=None if isinstance(source, str) else source,
        sampling=params,
        stream=options.stream,
        return_logprob=options.return_logprob,
        logprob_start_len=options.logprob_start_len,
        top_logprobs_num=options.top_logprobs_num,
        token_ids_logprob=options.token_ids_logprob,
        adapter=adapter,
    )


def _prompts(
    prompt: str | Sequence[str] | None, input_ids: Sequence[int] | Sequence[Sequence[int]] | None, vocab_size: int
) -> tuple[list[str | list[int]], bool]:
    if (prompt is None) == (input_ids is None):
        raise RequestError("pass either prompt or input_ids", field="prompt")
    if prompt is not None:
        if isinstance(prompt, str):
            return [prompt], False
        texts: list[str | list[int]] = list(prompt)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise RequestError("prompt must be a string or a list of at least one string", field="prompt")
        return texts, True
    ids: list[Any] = list(input_ids or ())
    if ids and not isinstance(ids[0], int):
        return [parse_token_ids(list(item), vocab_size=vocab_size) for item in ids], True
    return [parse_token_ids(ids, vocab_size=vocab_size)], False


def _adapters(options: CallOptions, count: int) -> list[str | None]:
    given = options.lora_path
    if given is None or isinstance(given, str):
        return [given] * count
    if len(given) != count:
        raise RequestError(
            f"lora_path is a list of {len(given)} for {count} prompts; pass one name or one for each",
            field="lora_path",
        )
    return list(given)


def _samplings(options: CallOptions, count: int) -> Iterator[SamplingParams]:
    given = options.sampling
    each: Sequence[Mapping[str, Any] | None]
    if given is None or isinstance(given, Mapping):
        each = [given] * count
    elif len(given) != count:
        raise RequestError(
            f"sampling_params is a list of {len(given)} for {count} prompts; pass one mapping or one for each",
            field="sampling_params",
        )
    else:
        each = list(given)
    for one in each:
        yield parse_sampling_params(
            None if one is None else dict(one),
            vocab_size=options.vocab_size,
            defaults=options.defaults,
            allow_zero_tokens=True,
        )
