"""Bodies of the native routes for text and tokens."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sglang_lite.server.definitions.base import RequestBody

PerPrompt = dict[str, Any] | list[dict[str, Any] | None]


_NUMBERS = {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]}}
Vectors = Annotated[list[Any], msgspec.Meta(extra_json_schema={"items": _NUMBERS})]
"""A prompt of vectors, or several. The numbers are looked at where they are read, once."""


class SessionParamsBody(msgspec.Struct, frozen=True, kw_only=True):
    """``session_params``: the request of a session that is continued, and how."""

    id: str | None = None
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


SessionFields = SessionParamsBody | list[None]
"""Clients of batches fill absent fields with lists of null."""


class GenerateBody(RequestBody, frozen=True, kw_only=True):
    """``POST /generate``: one of ``text``, ``input_ids`` and ``input_embeds``.

    Most fields may be lists with an entry for each prompt.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    input_embeds: Vectors | None = None
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
    session_id: str | list[None] | None = None
    session_params: SessionFields | None = None
    explain: bool | None = None


class VertexBody(RequestBody, frozen=True, kw_only=True):
    """``POST /vertex_generate``: instances with one prompt each, and the other fields of ``/generate``."""

    instances: list[dict[str, Any]]
    parameters: dict[str, Any] | None = None


class OpenSessionBody(RequestBody, frozen=True, kw_only=True):
    """``POST /open_session``."""

    capacity_of_str_len: Annotated[int, msgspec.Meta(ge=0)]
    session_id: str | None = None
    streaming: bool | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None


class CloseSessionBody(RequestBody, frozen=True, kw_only=True):
    """``POST /close_session``."""

    session_id: str


class InternalStateBody(RequestBody, frozen=True, kw_only=True):
    """``POST /set_internal_state``: options and their new values."""

    server_args: dict[str, Any] | None = None


class TokenizeBody(RequestBody, frozen=True, kw_only=True):
    """``POST /tokenize``: one of ``prompt`` and ``messages``."""

    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(RequestBody, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int | list[int]]
    skip_special_tokens: bool | None = None
