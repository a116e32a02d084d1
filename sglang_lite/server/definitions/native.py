"""Bodies of the native routes for text and tokens."""

from __future__ import annotations

from typing import Any

from sglang_lite.server.definitions.base import RequestBody

PerPrompt = dict[str, Any] | list[dict[str, Any] | None]


class GenerateBody(RequestBody, frozen=True, kw_only=True):
    """``POST /generate``: one of ``text`` and ``input_ids``; most fields may be lists with an entry for each prompt."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: PerPrompt | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool | None] | None = None
    logprob_start_len: int | list[int | None] | None = None
    top_logprobs_num: int | list[int | None] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    priority: int | None = None
    lora_path: str | list[str | None] | None = None
    explain: bool | None = None


class TokenizeBody(RequestBody, frozen=True, kw_only=True):
    """``POST /tokenize``: one of ``prompt`` and ``messages``."""

    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(RequestBody, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int | list[int]]
    skip_special_tokens: bool | None = None
