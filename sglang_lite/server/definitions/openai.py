"""Bodies of the completion routes of OpenAI's API. Ranges that depend on the model are checked where they are read."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sglang_lite.server.definitions.base import RequestBody
from sglang_lite.server.definitions.native import SessionFields
from sglang_lite.server.definitions.pooling import Texts

Count = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Salt = str | list[str | None]


class StreamOptionsBody(msgspec.Struct, frozen=True, kw_only=True):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SampledBody(RequestBody, frozen=True, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptionsBody | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_k: int | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    user: str | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
    lora_path: Salt | None = None
    session_id: str | None = None
    session_params: SessionFields | None = None
    explain: bool | None = None


class CompletionBody(SampledBody, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Texts
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=128)] | None = None
    best_of: Count | None = None


class ChatBody(SampledBody, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] | None = None
    input_ids: list[int] | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=128)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | float | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
