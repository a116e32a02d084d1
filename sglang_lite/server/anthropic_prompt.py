"""From a body of Anthropic's API to the body of a chat completion that asks for the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sglang_lite.frontend.fields import shorten
from sglang_lite.server.definitions.anthropic import AnthropicMessage, CountTokensBody, MessagesBody, Thinking
from sglang_lite.server.errors import encode_json
from sglang_lite.types import RequestError

_PASSED_ON = (
    "model",
    "rid",
    "request_id",
    "priority",
    "cache_salt",
    "extra_key",
    "lora_path",
    "session_id",
    "custom_labels",
)
_DISAGGREGATION = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "data_parallel_rank")
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "stream")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_HIDDEN_BLOCKS = ("thinking", "redacted_thinking")


def chat_body(raw: Mapping[str, Any], body: CountTokensBody) -> dict[str, Any]:
    """The chat body.

    Args:
        raw: as it came, for fields that both APIs have.
        body: the same, checked.

    Raises:
        RequestError: a content block that a text model cannot read, or fields that contradict each other.
    """
    chat: dict[str, Any] = {name: raw[name] for name in (*_PASSED_ON, *_DISAGGREGATION) if raw.get(name) is not None}
    chat["messages"] = _messages(body)
    if body.tools:
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                    **({} if tool.strict is None else {"strict": tool.strict}),
                },
            }
            for tool in body.tools
        ]
    _choose_tools(chat, body)
    _think(chat, body.thinking)
    if isinstance(body, MessagesBody):
        chat.update({name: raw[name] for name in _SAMPLING if raw.get(name) is not None})
        if body.stop_sequences:
            chat["stop"] = body.stop_sequences
    return chat


def _choose_tools(chat: dict[str, Any], body: CountTokensBody) -> None:
    choice = body.tool_choice
    if choice is None:
        return
    if choice.type == "tool":
        if not choice.name:
            raise RequestError("tool_choice.name is required with type tool", field="tool_choice")
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice.type != "auto" or body.tools:
        chat["tool_choice"] = _CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False


def _think(chat: dict[str, Any], thinking: Thinking | None) -> None:
    if thinking is None:
        return
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise RequestError("thinking.budget_tokens is required with type enabled", field="thinking.budget_tokens")
    if thinking.type != "adaptive":
        thinks = thinking.type == "enabled"
        chat["chat_template_kwargs"] = {"thinking": thinks, "enable_thinking": thinks}


def _messages(body: CountTokensBody) -> list[dict[str, Any]]:
    if not body.messages:
        raise RequestError("messages: at least one message is required", field="messages")
    messages: list[dict[str, Any]] = []
    if body.system:
        system = body.system if isinstance(body.system, str) else _texts("system", body.system)
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        messages.extend(_turn(f"messages[{index}].content", message))
    return messages


def _turn(where: str, message: AnthropicMessage) -> Iterable[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(where, message.content)]
    results, blocks = [], []
    for index, block in enumerate(message.content):
        if block.get("type") == "tool_result":
            results.append(_tool_result(f"{where}[{index}]", block))
        else:
            blocks.append(block)
    text = [{"role": message.role, "content": _texts(where, blocks)}] if blocks or not results else []
    return [*results, *text]


def _assistant(where: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    calls, blocks, reasoning = [], [], []
    for index, block in enumerate(content):
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_tool_call(f"{where}[{index}]", block))
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking") or ""))
        elif kind not in _HIDDEN_BLOCKS:
            blocks.append(block)
    message: dict[str, Any] = {"role": "assistant", "content": _texts(where, blocks)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name must be a non-empty string", field=f"{where}.name")
    arguments = encode_json({} if given is None else given).decode()
    return {"id": block.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content") or ""
    text = content if isinstance(content, str) else _texts(f"{where}.content", content)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _texts(where: str, blocks: object) -> str:
    """The text of blocks, a blank between them as between the parts of a chat message."""
    if not isinstance(blocks, list):
        raise RequestError(f"{where} must be a string or a list of blocks", field=where)
    texts = []
    for index, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        text = block.get("text") if isinstance(block, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise RequestError(
                f"{where}[{index}] has type {shorten(kind)}, but this model takes text blocks only", field=where
            )
        texts.append(text)
    return " ".join(texts)
