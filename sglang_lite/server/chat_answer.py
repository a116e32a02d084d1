"""How the text of a chat completion is read: the formats that the server knows, and what the request says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_lite.frontend.parsing.answer import AnswerFormat, AnswerParser
from sglang_lite.frontend.parsing.detection import detect_reasoning_parser, detect_tool_parser
from sglang_lite.frontend.parsing.events import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta
from sglang_lite.frontend.parsing.formats import ToolFormat
from sglang_lite.frontend.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from sglang_lite.frontend.request import FinishReason, GenerationOutput
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.frontend.tool_choice import ToolChoice
from sglang_lite.server import fields
from sglang_lite.server.context import ServerContext
from sglang_lite.server.sequences import Prompt
from sglang_lite.types import SamplingParams, ThinkingTokens

logger = logging.getLogger(__name__)


def tool_parser_name(context: ServerContext) -> str | None:
    """The name of the format of calls; ``auto`` is what the chat template shows."""
    name = context.config.tool_call_parser
    if name != "auto":
        return name
    return None if context.chat_template is None else detect_tool_parser(context.chat_template.source)


def reasoning_parser_name(context: ServerContext) -> str | None:
    """The name of the format of reasoning; ``auto`` is what the chat template shows."""
    name = context.config.reasoning_parser
    if name != "auto":
        return name
    return None if context.chat_template is None else detect_reasoning_parser(context.chat_template.source)


def answer_format(
    context: ServerContext,
    body: Mapping[str, Any],
    tools: ToolChoice,
    calls: ToolFormat | None,
    prompt: Prompt,
    variables: Mapping[str, Any],
    *,
    is_constrained: bool,
) -> AnswerFormat:
    """How the answer to a request is read.

    Args:
        calls: the format of calls, None for none.
        variables: what the chat template got from the request.
        is_constrained: a grammar shapes the whole answer; there is no reasoning then (see ``thinking_of``).

    Raises:
        RequestError: a field is wrong.
    """
    separate = fields.boolean(body, "separate_reasoning", True)
    stream = fields.boolean(body, "stream_reasoning", True)
    reasoning, inside = None, False
    if separate and not is_constrained:
        reasoning, inside = _reasoning_of(context, body, prompt, variables)
    return AnswerFormat(reasoning, inside, stream, calls, tools.toolset, _earlier_calls(body))


def _reasoning_of(
    context: ServerContext, body: Mapping[str, Any], prompt: Prompt, variables: Mapping[str, Any]
) -> tuple[ReasoningFormat | None, bool]:
    """The format in which the model will reason, None when it will not; and whether the answer begins inside it."""
    name = reasoning_parser_name(context)
    if name is None:
        return None, False
    form = REASONING_FORMATS[name]
    inside = form.begins_inside(prompt if isinstance(prompt, str) else None, _continued(body))
    is_on = form.toggle.is_on({**(context.config.default_chat_template_kwargs or {}), **variables})
    return (form, inside) if is_on or (inside and not form.forced) else (None, inside)


def thinking_of(
    context: ServerContext, body: Mapping[str, Any], prompt: Prompt, variables: Mapping[str, Any]
) -> ThinkingTokens | None:
    """The reasoning that a grammar of this request leaves alone; None when there is none.

    None too where its markers are not tokens of their own: then nobody could say where the grammar begins, and it
    shapes the whole answer.
    """
    form, inside = _reasoning_of(context, body, prompt, variables)
    return None if form is None else thinking_tokens(form, context.engine.tokenizer, inside=inside)


def thinking_tokens(form: ReasoningFormat, tokenizer: Tokenizer | None, *, inside: bool) -> ThinkingTokens | None:
    """The markers of a format as tokens; None where they are none."""
    if tokenizer is None or form.kind != "block":
        return None
    start, end = tokenizer.token_to_id(form.start), tokenizer.token_to_id(form.end)
    if end is None or (start is None and not inside):
        return None
    return ThinkingTokens(-1 if inside or start is None else start, end)


def visible_markers(
    sampling: SamplingParams, how: AnswerFormat, tools: ToolChoice, tokenizer: Tokenizer | None
) -> SamplingParams:
    """``sampling`` with special tokens in the text where the formats need to see them."""
    if tokenizer is None or not sampling.skip_special_tokens:
        return sampling
    markers = () if how.reasoning is None else how.reasoning.markers
    if not tools.shown and not any(tokenizer.token_to_id(marker) in tokenizer.special_ids for marker in markers):
        return sampling
    return msgspec.structs.replace(sampling, skip_special_tokens=False)


def _continued(body: Mapping[str, Any]) -> str | None:
    """The text of the answer that the request itself has written, in ``continue_final_message``."""
    messages = body.get("messages")
    if not body.get("continue_final_message") or not isinstance(messages, list) or not messages:
        return None
    content = messages[-1].get("content") if isinstance(messages[-1], Mapping) else None
    return content if isinstance(content, str) else None


def _earlier_calls(body: Mapping[str, Any]) -> int:
    messages = body.get("messages")
    calls = (message.get("tool_calls") for message in messages if isinstance(message, Mapping)) if messages else ()
    return sum(len(made) for made in calls if isinstance(made, list))


class ChoiceReader:
    """Reads the answer of one choice from its snapshots.

    Attributes:
        reasoning_tokens: output tokens that were reasoning, its markers included; known at the end.
    """

    def __init__(self, how: AnswerFormat, tokenizer: Tokenizer | None, *, skip_special_tokens: bool) -> None:
        self._how = how
        self._parser = AnswerParser(how)
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._seen = 0
        self._has_calls = False
        self.reasoning_tokens = 0

    def read(self, output: GenerationOutput) -> list[Delta]:
        """What a snapshot adds to the answer."""
        text = output.text[self._seen :]
        self._seen += len(text)
        deltas = self._parser.push(text)
        if output.finish_reason is not None:
            deltas += self._parser.finish()
            self.reasoning_tokens = self._count(output)
        self._has_calls = self._has_calls or any(isinstance(delta, CallStart) for delta in deltas)
        return deltas

    def call_id(self, delta: CallStart) -> str:
        """A new id for a call."""
        return self._how.call_id(delta.name, delta.index)

    def ends_with_calls(self, reason: FinishReason) -> bool:
        """Whether the choice ended in order to have its calls made."""
        return self._has_calls and reason.type == "stop"

    def _count(self, output: GenerationOutput) -> int:
        """Tokens whose text begins inside a block of reasoning."""
        spans = self._parser.spans
        form = self._how.reasoning
        if not spans or self._tokenizer is None or form is None:
            return 0
        if form.kind == "block" and spans[0][0] == 0:
            # The usual case, without a look at every token: the marker is a token, and it ends the only block.
            end_id = self._tokenizer.token_to_id(form.end)
            if end_id is not None and end_id in output.output_ids:
                return output.output_ids.index(end_id) + 1
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=self._skip_special_tokens)
        count = place = 0
        position = 0
        last = spans[-1][1]
        for token in output.output_ids:
            if place >= last and last < len(output.text):
                break
            while position < len(spans) - 1 and place >= spans[position][1]:
                position += 1
            start, end = spans[position]
            count += start <= place < end
            place += len(detokenizer.push(token))
        return count


def delta_object(reader: ChoiceReader, delta: Delta) -> dict[str, Any]:
    """The ``delta`` of a chunk."""
    match delta:
        case TextDelta(text):
            return {"reasoning_content": None, "content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case CallStart(index, name):
            call = _call_object(reader.call_id(delta), index, name, "")
        case CallArguments(index, text):
            call = _call_object(None, index, None, text)
    return {"role": None, "content": None, "reasoning_content": None, "tool_calls": [call]}


def _call_object(call_id: str | None, index: int, name: str | None, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "index": index, "type": "function", "function": {"name": name, "arguments": arguments}}


def message_object(reader: ChoiceReader, deltas: list[Delta]) -> dict[str, Any]:
    """The whole message of a choice."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": None}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        match delta:
            case TextDelta(text):
                message["content"] += text
            case ReasoningDelta(text):
                message["reasoning_content"] = (message["reasoning_content"] or "") + text
            case CallStart(index, name):
                calls.append(_call_object(reader.call_id(delta), index, name, ""))
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    if calls:
        message["tool_calls"] = calls
    return message
