"""Replies of Anthropic's API: content blocks, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from sglang_lite.frontend.parsing.events import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta
from sglang_lite.frontend.request import FinishReason, GenerationOutput
from sglang_lite.server.chat_routes import ChatCall
from sglang_lite.server.errors import anthropic_error
from sglang_lite.types import RequestError


def _stop_reason(reason: FinishReason | None, *, has_calls: bool) -> str | None:
    if reason is None:
        return None
    if reason.type == "length":
        return "max_tokens"
    return "tool_use" if has_calls else "end_turn"


def _usage(output: GenerationOutput) -> dict[str, int]:
    return {"input_tokens": output.prompt_tokens, "output_tokens": output.completion_tokens}


def _message(call: ChatCall, shown_id: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": shown_id,
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": call.model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _decoded(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments) if arguments else {}
    except msgspec.DecodeError:
        return {}  # cut off by the token limit


def message_reply(call: ChatCall, shown_id: str, output: GenerationOutput) -> dict[str, Any]:
    """The whole message."""
    (reader,) = call.readers()
    content: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    for delta in reader.read(output):
        match delta:
            case TextDelta(text):
                _last_block(content, "text", {"text": ""})["text"] += text
            case ReasoningDelta(text):
                _last_block(content, "thinking", {"thinking": "", "signature": ""})["thinking"] += text
            case CallStart(_, name):
                arguments[len(content)] = ""
                content.append({"type": "tool_use", "id": reader.call_id(delta), "name": name, "input": {}})
            case CallArguments(_, text):
                arguments[len(content) - 1] += text
    for index, text in arguments.items():
        content[index]["input"] = _decoded(text)
    message = _message(call, shown_id, content or [{"type": "text", "text": ""}])
    message["stop_reason"] = _stop_reason(output.finish_reason, has_calls=bool(arguments))
    return {**message, "usage": _usage(output)}


def _last_block(content: list[dict[str, Any]], kind: str, empty: dict[str, Any]) -> dict[str, Any]:
    """The last block where it is of this kind, else a new one."""
    if not content or content[-1]["type"] != kind:
        content.append({"type": kind, **empty})
    return content[-1]


class MessageWriter:
    """Writes the events of a message: one content block after another."""

    def __init__(self, call: ChatCall, shown_id: str) -> None:
        self._call = call
        self._id = shown_id
        (self._reader,) = call.readers()
        self._started = False
        self._block = -1
        self._open: str | None = None
        self._has_calls = False

    def events(self, output: GenerationOutput) -> Iterator[dict[str, Any]]:
        """What a new snapshot calls for."""
        if not self._started:
            self._started = True
            message = {**_message(self._call, self._id, []), "usage": {**_usage(output), "output_tokens": 0}}
            yield {"type": "message_start", "message": message}
        for delta in self._reader.read(output):
            yield from self._of(delta)
        if output.finish_reason is not None:
            yield from self._end(output)

    def failure_events(self, error: RequestError) -> Iterator[dict[str, Any]]:
        """One event that says what went wrong."""
        yield anthropic_error(error.message, error.status)

    def _of(self, delta: Delta) -> Iterator[dict[str, Any]]:
        match delta:
            case TextDelta(text):
                yield from self._enter("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                yield from self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallStart(index, name):
                self._has_calls = True
                block = {"type": "tool_use", "id": self._reader.call_id(delta), "name": name, "input": {}}
                yield from self._enter(f"call {index}", block)
            case CallArguments(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _enter(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Make sure that the open block is of this kind."""
        if self._open == kind:
            return
        yield from self._leave()
        self._block += 1
        self._open = kind
        yield {"type": "content_block_start", "index": self._block, "content_block": block}

    def _leave(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _end(self, output: GenerationOutput) -> Iterator[dict[str, Any]]:
        if self._block < 0:
            yield from self._enter("text", {"type": "text", "text": ""})
        yield from self._leave()
        reason = _stop_reason(output.finish_reason, has_calls=self._has_calls)
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": _usage(output),
        }
        yield {"type": "message_stop"}
