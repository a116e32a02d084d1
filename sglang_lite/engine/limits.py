"""Checks of a tokenized request against the model and the pool, before it may reach the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_lite.engine.info import EngineInfo
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.types import Int32Array, RequestError

RESUMED_FIELD = "resume_from"


@dataclass(slots=True, frozen=True)
class PreparedPrompt:
    """A prompt that fits.

    Attributes:
        token_ids: int32[T], T >= 1; behind the prompt, what the request resumes.
        max_new_tokens: already limited to the context and the pool; counts what the request resumes.
        num_resumed: tokens that it resumes.
    """

    token_ids: Int32Array
    max_new_tokens: int
    num_resumed: int = 0

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids) - self.num_resumed


def prepare_prompt(
    request: GenerateRequest, token_ids: Sequence[int], info: EngineInfo, *, allow_auto_truncate: bool
) -> PreparedPrompt:
    """Check ids and lengths of a request.

    Args:
        token_ids: its prompt, from ``input_ids`` or from the tokenizer.
        allow_auto_truncate: cut a prompt or an output that is too long instead of refusing the request.

    Raises:
        RequestError: 400 naming the field and the numbers.
    """
    prompt = _checked_ids(token_ids, info.vocab_size, request.prompt_field)
    _check_vocabulary(request, info.vocab_size)
    if allow_auto_truncate:
        longest = max(1, min(info.context_length, info.max_req_input_len) - 1)
        prompt = prompt[:longest]
    if not -1 <= request.logprob_start_len <= len(prompt):
        raise RequestError(
            f"logprob_start_len={request.logprob_start_len} is higher than the number of input tokens {len(prompt)}.",
            field="logprob_start_len",
        )
    _check_length(request, len(prompt), info)
    max_new_tokens = _limited_output(
        len(prompt), request.sampling.max_new_tokens, info, may_cut=allow_auto_truncate or request.limit_is_default
    )
    resumed = request.resumed_ids
    if not resumed:
        return PreparedPrompt(prompt, max_new_tokens)
    output = _checked_ids(resumed, info.vocab_size, RESUMED_FIELD)
    if len(output) >= max_new_tokens:
        raise RequestError(
            f"{RESUMED_FIELD} has {len(output)} tokens, but the output may have {max_new_tokens}", field=RESUMED_FIELD
        )
    return PreparedPrompt(np.concatenate((prompt, output)), max_new_tokens, len(output))


def _check_length(request: GenerateRequest, prompt_tokens: int, info: EngineInfo) -> None:
    if prompt_tokens >= info.context_length:
        raise RequestError(
            f"The input ({prompt_tokens} tokens) is longer than the model's context length "
            f"({info.context_length} tokens).",
            field=request.prompt_field,
        )


def _limited_output(prompt_tokens: int, wanted: int | None, info: EngineInfo, *, may_cut: bool) -> int:
    """How many tokens may be generated; ``wanted`` None means as many as fit, ``may_cut`` that more are no error."""
    context = info.context_length
    if wanted is not None and prompt_tokens + wanted > context and not may_cut:
        raise RequestError(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. "
            f"You requested a total of {prompt_tokens + wanted} tokens: {prompt_tokens} tokens from the input messages "
            f"and {wanted} tokens for the completion. Please reduce the number of tokens in the input messages or the "
            f"completion to fit within the limit.",
            field="max_new_tokens",
        )
    if prompt_tokens >= info.max_req_input_len:
        raise RequestError(
            f"Input length ({prompt_tokens} tokens) exceeds the maximum allowed length "
            f"({info.max_req_input_len} tokens). Use a shorter input or enable --allow-auto-truncate."
        )
    room = max(0, min(context, info.max_total_tokens) - prompt_tokens)
    return room if wanted is None else min(wanted, room)


def _checked_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> Int32Array:
    if len(token_ids) == 0:
        raise RequestError(f"{field}: the prompt has no tokens; send at least one character or token id", field=field)
    try:
        ids = np.asarray(token_ids, np.int64)
    except (OverflowError, ValueError, TypeError):
        raise RequestError(f"{field} must be a list of integers in [0, {vocab_size - 1}]", field=field) from None
    if ids.min() < 0 or ids.max() >= vocab_size:
        position = int(((ids < 0) | (ids >= vocab_size)).argmax())
        raise RequestError(
            f"{field}[{position}] is {int(ids[position])}; token ids must be in [0, {vocab_size - 1}].",
            field=field,
        )
    return ids.astype(np.int32)


def _check_vocabulary(request: GenerateRequest, vocab_size: int) -> None:
    """Ids in the parameters must exist. The bias message is SGLang's, word for word."""
    sampling = request.sampling
    biased = _first_outside(sampling.logit_bias, vocab_size) if sampling.logit_bias else None
    if biased is not None:
        raise RequestError(f"logit_bias must has keys in [0, {vocab_size - 1}], got {biased}.", field="logit_bias")
    for name, ids in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("token_ids_logprob", request.token_ids_logprob),
    ):
        if not ids:
            continue
        outside = _first_outside(ids, vocab_size)
        if outside is not None:
            raise RequestError(f"{name} must be in [0, {vocab_size - 1}], got {outside}.", field=name)


def _first_outside(ids: Iterable[int], vocab_size: int) -> int | None:
    return next((token for token in ids if not 0 <= token < vocab_size), None)
