"""Replies of the Responses API: output items, whole or as events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_lite.frontend.parsing.events import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta
from sglang_lite.frontend.request import FinishReason, GenerationOutput
from sglang_lite.server.chat_answer import ChoiceReader
from sglang_lite.server.chat_routes import ChatCall
from sglang_lite.server.definitions.responses import ResponsesBody
from sglang_lite.types import RequestError


@dataclass(slots=True, frozen=True)
class ResponseCall:
    """One request and how its reply is written.

    Attributes:
        shown_id: id of the response.
        stored: whether it can be looked up later.
    """

    shown_id: str
    chat: ChatCall
    body: ResponsesBody
    stored: bool

    def response(self, status: str, output: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """The object ``response``."""
        body, chat = self.body, self.chat
        sampling = chat.sequences[0].sampling
        reasoning = body.reasoning
        return {
            "id": self.shown_id,
            "object": "response",
            "created_at": chat.created,
            "status": status,
            "background": bool(body.background),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": chat.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary,
            },
            "store": self.stored,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"} if body.text is None else _shown_format(body)},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            **fields,
        }

    def finished(self, output: GenerationOutput, items: list[dict[str, Any]], reasoning_tokens: int) -> dict[str, Any]:
        """The response at its end."""
        return self.response(
            _status(output.finish_reason),
            items,
            incomplete_details=_incomplete(output.finish_reason),
            usage={
                "input_tokens": output.prompt_tokens,
                "input_tokens_details": {"cached_tokens": output.cached_tokens},
                "output_tokens": output.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
                "total_tokens": output.prompt_tokens + output.completion_tokens,
            },
        )

    def failed(self, message: str, status: int) -> dict[str, Any]:
        """The response that ended with an error."""
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        return self.response("failed", [], error={"code": code, "message": message})


def _shown_format(body: ResponsesBody) -> dict[str, Any]:
    form = body.text.format if body.text is not None else None
    if form is None:
        return {"type": "text"}
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": form.type, "name": form.name, "schema": form.schema, "strict": form.strict}


def _status(reason: FinishReason | None) -> str:
    if reason is not None and reason.type == "length":
        return "incomplete"
    return "cancelled" if reason is not None and reason.type == "abort" else "completed"


def _incomplete(reason: FinishReason | None) -> dict[str, str] | None:
    return {"reason": "max_output_tokens"} if _status(reason) == "incomplete" else None


class ItemWriter:
    """Turns what an answer adds into output items and their events.

    Attributes:
        items: so far, the open one included.
    """

    def __init__(self, reader: ChoiceReader) -> None:
        self._reader = reader
        self._open: str | None = None
        self.items: list[dict[str, Any]] = []

    def add(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The events of one more piece, without sequence numbers."""
        match delta:
            case TextDelta(text):
                yield from self._enter_message()
                self.items[-1]["content"][0]["text"] += text
                yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=[])
            case ReasoningDelta(text):
                yield from self._enter_reasoning()
                self.items[-1]["content"][0]["text"] += text
                yield self._event("response.reasoning_text.delta", content_index=0, delta=text)
            case CallStart(index, name):
                yield from self.close()
                item = {"type": "function_call", "id": _new_id("fc_"), "call_id": self._reader.call_id(delta)}
                yield from self._enter(f"call {index}", {**item, "name": name, "arguments": ""})
            case CallArguments(_, text):
                self.items[-1]["arguments"] += text
                yield self._event("response.function_call_arguments.delta", delta=text)

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the open item, if there is one."""
        if self._open is None:
            return
        item = self.items[-1]
        item["status"] = status
        if self._open == "message":
            part = item["content"][0]
            yield self._event("response.output_text.done", content_index=0, text=part["text"], logprobs=[])
            yield self._event("response.content_part.done", content_index=0, part=part)
        elif self._open == "reasoning":
            yield self._event("response.reasoning_text.done", content_index=0, text=item["content"][0]["text"])
        else:
            yield self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        self._open = None

    def end(self, reason: FinishReason | None) -> Iterator[dict[str, Any]]:
        """End the answer: an empty one is an empty message."""
        if not self.items:
            yield from self._enter_message()
        yield from self.close("incomplete" if _status(reason) == "incomplete" else "completed")

    def _enter_message(self) -> Iterator[dict[str, Any]]:
        if self._open == "message":
            return
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"type": "message", "id": _new_id("msg_"), "role": "assistant", "content": []}
        yield from self._enter("message", item)
        self.items[-1]["content"] = [part]
        yield self._event("response.content_part.added", content_index=0, part=dict(part))

    def _enter_reasoning(self) -> Iterator[dict[str, Any]]:
        if self._open != "reasoning":
            yield from self._enter("reasoning", {"type": "reasoning", "id": _new_id("rs_"), "summary": []})
            self.items[-1]["content"] = [{"type": "reasoning_text", "text": ""}]

    def _enter(self, kind: str, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        self._open = kind
        self.items.append({**item, "status": "in_progress"})
        added = dict(self.items[-1])
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": added}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def whole_response(call: ResponseCall, output: GenerationOutput) -> dict[str, Any]:
    """The response of an answer that is complete."""
    (reader,) = call.chat.readers()
    writer = ItemWriter(reader)
    for delta in reader.read(output):
        for _ in writer.add(delta):
            pass  # only the items are wanted
    for _ in writer.end(output.finish_reason):
        pass
    return call.finished(output, writer.items, reader.reasoning_tokens)


class ResponseWriter:
    """Writes the events of a response, numbered from 0.

    Attributes:
        result: the whole response, once it has ended.
    """

    def __init__(self, call: ResponseCall) -> None:
        self._call = call
        (self._reader,) = call.chat.readers()
        self._items = ItemWriter(self._reader)
        self._number = 0
        self.result: dict[str, Any] | None = None

    def events(self, output: GenerationOutput) -> Iterator[dict[str, Any]]:
        """What a new snapshot calls for."""
        for event in self._events(output):
            yield self._numbered(event)

    def failure_events(self, error: RequestError) -> Iterator[dict[str, Any]]:
        """One event that says what went wrong."""
        self.result = self._call.failed(error.message, error.status)
        yield self._numbered({"type": "response.failed", "response": self.result})

    def _events(self, output: GenerationOutput) -> Iterator[dict[str, Any]]:
        if self._number == 0:
            begun = self._call.response("in_progress", [])
            yield {"type": "response.created", "response": begun}
        for delta in self._reader.read(output):
            yield from self._items.add(delta)
        if output.finish_reason is not None:
            yield from self._items.end(output.finish_reason)
            self.result = self._call.finished(output, self._items.items, self._reader.reasoning_tokens)
            # Also of an answer that was cut, as SGLang does it: its status says so, and clients wait for this event.
            yield {"type": "response.completed", "response": self.result}

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        numbered = {"type": event["type"], "sequence_number": self._number, **event}
        self._number += 1
        return numbered
