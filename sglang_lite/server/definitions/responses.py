"""Body of ``POST /v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sglang_lite.server.definitions.base import RequestBody


class ResponsesReasoning(msgspec.Struct, frozen=True, kw_only=True):
    """How much the model thinks."""

    effort: str | None = None
    summary: str | None = None


class ResponsesFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesText(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the text."""

    format: ResponsesFormat | None = None
    verbosity: str | None = None


class ResponsesBody(RequestBody, frozen=True, kw_only=True):
    """``POST /v1/responses``."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponsesReasoning | None = None
    text: ResponsesText | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    user: str | None = None
    stop: str | list[str] | None = None
