"""From a body of the Responses API to the body of a chat completion that asks for the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_lite.frontend.fields import shorten
from sglang_lite.server.definitions.responses import ResponsesBody
from sglang_lite.types import RequestError

_PASSED_ON = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "seed",
    "stream",
    "parallel_tool_calls",
    "rid",
    "request_id",
    "priority",
    "cache_salt",
    "extra_key",
    "lora_path",
    "session_id",
    "chat_template_kwargs",
    "routed_dp_rank",
    "data_parallel_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
)
_TEXT_PARTS = ("input_text", "output_text", "text")


def refuse_unserved(body: ResponsesBody) -> None:
    """Refuse what the type has and this server does not do.

    Raises:
        RequestError: naming the field.
    """
    if body.top_logprobs or body.include:
        field = "include" if body.include else "top_logprobs"
        message = f"{field} is not supported: responses have no log-probabilities, sources or encrypted reasoning"
        raise RequestError(message, field=field)
    if body.truncation == "auto":
        raise RequestError("truncation auto is not supported; allowed: disabled", field="truncation")


def chat_body(raw: Mapping[str, Any], body: ResponsesBody, history: list[dict[str, Any]]) -> dict[str, Any]:
    """The chat body.

    Args:
        raw: as it came, for fields that both APIs have.
        body: the same, checked.
        history: messages of the earlier responses that this one continues.

    Raises:
        RequestError: an item of the input that a text model cannot read.
    """
    chat: dict[str, Any] = {name: raw[name] for name in _PASSED_ON if raw.get(name) is not None}
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat["messages"] = [*system, *history, *input_messages(body)]
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _response_format(body)
    if body.tools:
        chat["tools"] = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    return chat


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    if body.text is None or body.text.format is None:
        return None
    form = body.text.format
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema is None:
        raise RequestError("text.format.schema is required with type json_schema", field="text.format.schema")
    schema = {"name": form.name or "answer", "schema": form.schema, "strict": form.strict}
    return {"type": "json_schema", "json_schema": schema}


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(f"{where} has type {shorten(tool.get('type'))}, but only function is served", field="tools")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise RequestError(f"tool_choice {shorten(choice)} is not served; name a function", field="tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def input_messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """The chat messages of the input.

    Raises:
        RequestError: it is empty, or an item is of a kind that a text model cannot read.
    """
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    if not body.input:
        raise RequestError("Input cannot be empty", field="input")
    return item_messages(body.input)


def item_messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chat messages of items of an input or of an earlier output.

    Raises:
        RequestError: an item is of a kind that a text model cannot read.
    """
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        _append(messages, f"input[{index}]", item)
    return messages


def _append(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    match item.get("type", "message"):
        case "message":
            messages.append({"role": item.get("role"), "content": _content(where, item.get("content"))})
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            last = messages[-1] if messages else {}
            if last.get("role") == "assistant":
                last.setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        case "function_call_output":
            output = _content(f"{where}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        case "reasoning":
            pass  # templates leave the reasoning of earlier turns out
        case kind:
            raise RequestError(f"{where} has type {shorten(kind)}, which this model cannot read", field=where)


def _content(where: str, content: object) -> Any:
    """Content in the words of chat messages; its other checks are those of chat."""
    if not isinstance(content, list):
        return content
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            kind = part.get("type") if isinstance(part, dict) else part
            raise RequestError(
                f"{where}.content[{index}] has type {shorten(kind)}, but this model takes text parts only", field=where
            )
        parts.append({"type": "text", "text": part.get("text")})
    return parts
