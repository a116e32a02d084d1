"""Chat messages from untrusted JSON to the plain form that templates expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_lite.frontend.fields import describe, read_object, shorten, wrong_type
from sglang_lite.types import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "latest_reminder", "root")


def normalize_messages(raw: object) -> list[dict[str, Any]]:
    """Check messages and flatten their content to strings.

    Text parts are joined by a space, as SGLang does for templates that take strings; an assistant's parts of reasoning
    become its ``reasoning_content``. The arguments of earlier tool
    calls become objects where they hold a JSON object. Other keys of a message are passed on.

    Raises:
        RequestError: 400, naming the message.
    """
    if not isinstance(raw, list):
        wrong_type("messages", raw, "a sequence of messages")
    if not raw:
        raise RequestError("Messages cannot be empty.", field="messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(raw)]


def _message(where: str, raw: object) -> dict[str, Any]:
    message = dict(read_object(where, raw))
    role = message.get("role")
    if not isinstance(role, str) or role.lower() not in ROLES:
        shown = f'"{shorten(role)}"' if isinstance(role, str) else describe(role)
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {shown}.", field=f"{where}.role")
    message["role"] = role.lower()
    content = message.get("content")
    if message["role"] == "assistant" and isinstance(content, list):
        content, thoughts = _split_thoughts(f"{where}.content", content)
        if thoughts and message.get("reasoning_content") is None:
            message["reasoning_content"] = thoughts
    message["content"] = _content(f"{where}.content", content, message["role"])
    if message.get("tool_calls") is None:
        message.pop("tool_calls", None)
    else:
        message["tool_calls"] = _tool_calls(f"{where}.tool_calls", message["tool_calls"])
    return message


def _split_thoughts(where: str, parts: list[object]) -> tuple[list[object], str]:
    """The parts of an assistant's content that are no reasoning, and the text of those that are."""
    others: list[object] = []
    thoughts: list[str] = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind in ("thinking", "reasoning"):
            text = next((part[name] for name in ("thinking", "reasoning", "text") if part.get(name) is not None), None)
            if not isinstance(text, str):
                raise RequestError(f"{where}[{index}].{kind} must be a string, got {describe(text)}.", field=where)
            thoughts.append(text)
        else:
            others.append(part)
    return others, "\n".join(thoughts)


def _content(where: str, content: object, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise RequestError(f"{where} must be a string or a list of text parts for role {role}, got null.", field=where)
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts, got {describe(content)}.", field=where)
    return " ".join(_text_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _text_part(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = read_object(where, part).get("type")
    if kind != "text":
        shown = shorten(kind) if isinstance(kind, str) else describe(kind)
        raise RequestError(f"{where} has type {shown}, but this model takes text parts only.", field=where)
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string, got {describe(text)}.", field=f"{where}.text")
    return text


def _tool_calls(where: str, raw: object) -> list[dict[str, Any]]:
    if not isinstance(raw, list):
        wrong_type(where, raw, "a sequence of tool calls")
    calls = []
    for index, item in enumerate(raw):
        call = dict(read_object(f"{where}[{index}]", item))
        function = call.get("function")
        if function is not None:
            call["function"] = _function(f"{where}[{index}].function", function)
        calls.append(call)
    return calls


def _function(where: str, raw: object) -> dict[str, Any]:
    function = dict(read_object(where, raw))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Templates print objects with tojson; a string would be quoted a second time.
        try:
            decoded = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            return function
        if isinstance(decoded, dict):
            function["arguments"] = decoded
    return function
