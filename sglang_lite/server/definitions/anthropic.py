"""Bodies of the Anthropic routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sglang_lite.server.definitions.base import RequestBody

Positive = Annotated[int, msgspec.Meta(ge=1)]


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn; a content block is an object with a ``type``."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class AnthropicTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function of the client."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class AnthropicToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools may, or have to, be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1024)] | None = None


class CountTokensBody(RequestBody, frozen=True, kw_only=True):
    """``POST /v1/messages/count_tokens``."""

    model: str
    messages: list[AnthropicMessage]
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None


class MessagesBody(CountTokensBody, frozen=True, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
