"""SGLang's reply object for one sequence: ``{"text", "output_ids", "meta_info"}`` from a ``GenerationOutput``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_lite.frontend.request import GenerateRequest, GenerationOutput, TokenLogprobs

TokenText = Callable[[int], str]

LOGPROB_FIELDS = (
    "input_token_logprobs",
    "output_token_logprobs",
    "output_token_logprobs_length",
    "input_top_logprobs",
    "output_top_logprobs",
    "input_token_ids_logprobs",
    "output_token_ids_logprobs",
)
"""Keys of ``meta_info`` that are there with ``return_logprob`` alone."""


@dataclass(slots=True, frozen=True)
class ResultOptions:
    """What a reply shows beside the text.

    Attributes:
        with_text: False without a tokenizer; the reply then has no ``text``.
        return_logprob, top_logprobs, token_ids: which log-probability lists there are.
        token_text: text of a token id for the third element of logprob entries, None to leave it null.
        weight_version: text of ``meta_info.weight_version``.
    """

    with_text: bool = True
    return_logprob: bool = False
    top_logprobs: bool = False
    token_ids: bool = False
    token_text: TokenText | None = None
    weight_version: str = "default"


def result_options(
    request: GenerateRequest,
    *,
    with_text: bool = True,
    token_text: TokenText | None = None,
    weight_version: str = "default",
) -> ResultOptions:
    """The options that follow from a request."""
    return ResultOptions(
        with_text=with_text,
        return_logprob=request.return_logprob,
        top_logprobs=request.return_logprob and request.top_logprobs_num > 0,
        token_ids=request.return_logprob and bool(request.token_ids_logprob),
        token_text=token_text,
        weight_version=weight_version,
    )


def generation_result(output: GenerationOutput, options: ResultOptions) -> dict[str, Any]:
    """The reply object, with everything cumulative. It shares no list with ``output``."""
    reply: dict[str, Any] = {"text": output.text} if options.with_text else {}
    reply["output_ids"] = list(output.output_ids)
    reply["meta_info"] = meta_info(output, options)
    return reply


def meta_info(output: GenerationOutput, options: ResultOptions) -> dict[str, Any]:
    """The ``meta_info`` object. ``e2e_latency`` (seconds) is there once the sequence has ended."""
    reason = output.finish_reason
    info: dict[str, Any] = {
        "id": output.request_id,
        "finish_reason": reason.to_json() if reason is not None else None,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "cached_tokens": output.cached_tokens,
        "reasoning_tokens": 0,
        "weight_version": options.weight_version,
        "num_retractions": output.retractions,
    }
    if output.finished_at is not None:
        info["e2e_latency"] = output.finished_at - output.received_at
    if options.return_logprob:
        info |= _logprob_fields(output, options)
    return info


def _logprob_fields(output: GenerationOutput, options: ResultOptions) -> dict[str, Any]:
    text = options.token_text
    fields: dict[str, Any] = {
        "input_token_logprobs": [_entry(p.logprob, p.token_id, text) for p in output.input_logprobs],
        "output_token_logprobs": [_entry(p.logprob, p.token_id, text) for p in output.output_logprobs],
        "output_token_logprobs_length": len(output.output_logprobs),
    }
    if options.top_logprobs:
        fields["input_top_logprobs"] = [_alternatives(p, p.top, text) for p in output.input_logprobs]
        fields["output_top_logprobs"] = [_alternatives(p, p.top, text) for p in output.output_logprobs]
    if options.token_ids:
        fields["input_token_ids_logprobs"] = [_alternatives(p, p.extra, text) for p in output.input_logprobs]
        fields["output_token_ids_logprobs"] = [_alternatives(p, p.extra, text) for p in output.output_logprobs]
    return fields


def _entry(logprob: float | None, token_id: int, text: TokenText | None) -> list[Any]:
    return [logprob, token_id, text(token_id) if text is not None else None]


def _alternatives(
    position: TokenLogprobs, entries: Sequence[tuple[float, int]], text: TokenText | None
) -> list[list[Any]] | None:
    """The entries of one position; null where the model gives no distribution (the first prompt token)."""
    if position.logprob is None:
        return None
    return [_entry(logprob, token_id, text) for logprob, token_id in entries]
