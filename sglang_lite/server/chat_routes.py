"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from aiohttp import web

from sglang_lite.frontend.openai_sampling import chat_sampling
from sglang_lite.frontend.parsing.answer import AnswerFormat
from sglang_lite.frontend.parsing.events import TextDelta
from sglang_lite.frontend.request import FinishReason, GenerateRequest, GenerationOutput
from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.frontend.tool_choice import read_tool_choice
from sglang_lite.server import fields
from sglang_lite.server.bodies import read_object
from sglang_lite.server.call_grammar import call_grammar
from sglang_lite.server.chat_answer import (
    ChoiceReader,
    answer_format,
    delta_object,
    message_object,
    thinking_of,
    tool_parser_name,
    visible_markers,
)
from sglang_lite.server.chat_prompt import chat_prompt, template_variables
from sglang_lite.server.context import ServerContext, context_of
from sglang_lite.server.definitions.base import parse_body
from sglang_lite.server.definitions.openai import ChatBody
from sglang_lite.server.errors import json_response
from sglang_lite.server.event_replies import reply_with_events
from sglang_lite.server.explain_routes import explain_field
from sglang_lite.server.fixed_frames import FixedFrame
from sglang_lite.server.generation import MergedStream, collect
from sglang_lite.server.identity import Identity
from sglang_lite.server.off_loop import off_loop
from sglang_lite.server.openai_common import (
    StreamOptions,
    check_model,
    finish_name,
    matched_stop,
    now,
    total_usage,
)
from sglang_lite.server.openai_logprobs import chat_logprobs
from sglang_lite.server.resumable import take_over
from sglang_lite.server.sequences import build_sequences
from sglang_lite.server.session_turns import session_turns
from sglang_lite.server.text_length import refuse_endless_texts
from sglang_lite.types import RequestError

_MAX_TOP_LOGPROBS = LIMITS.openai_top_logprobs


@dataclass(slots=True, frozen=True)
class ChatCall:
    """One request: its sequences and how the reply is written."""

    identity: Identity
    model: str
    sequences: list[GenerateRequest]
    choices: int
    options: StreamOptions
    logprobs: bool
    tokenizer: Tokenizer | None
    created: int
    weight_version: str
    how: AnswerFormat

    def header(self, kind: str) -> dict[str, Any]:
        """The fields that open the reply and every chunk."""
        return {"id": self.identity.shown, "object": kind, "created": self.created, "model": self.model}

    def readers(self) -> list[ChoiceReader]:
        """A reader for every sequence."""
        return [
            ChoiceReader(self.how, self.tokenizer, skip_special_tokens=one.sampling.skip_special_tokens)
            for one in self.sequences
        ]


def read_call(context: ServerContext, body: dict[str, Any], headers: Mapping[str, str]) -> ChatCall:
    """Check a request body.

    Raises:
        RequestError: a field is wrong.
    """
    model, options = check_model(context, body), StreamOptions.read(body)
    logprobs = fields.boolean(body, "logprobs")
    top_logprobs = fields.integer(body, "top_logprobs", minimum=0, maximum=_MAX_TOP_LOGPROBS) or 0
    if top_logprobs and not logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", field="top_logprobs")
    tools = read_tool_choice(body)
    sampling = chat_sampling(body, vocab_size=context.engine.info.vocab_size, defaults=context.chat_defaults)
    prompt, variables = chat_prompt(context, body, tools), template_variables(body)
    wanted = call_grammar(tools, tool_parser_name(context), context.config.grammar_backend, context.engine.tokenizer)
    # A structural tag of the request leaves the text around it free.
    is_constrained = sampling.grammar is not None and sampling.grammar.kind != "structural_tag"
    if wanted.grammar is not None and (wanted.covers_all or sampling.grammar is None):
        sampling, is_constrained = msgspec.structs.replace(sampling, grammar=wanted.grammar), wanted.covers_all
    waits = is_constrained or (wanted.grammar is not None and sampling.grammar == wanted.grammar)
    if waits and (thinking := thinking_of(context, body, prompt, variables)) is not None:
        sampling, is_constrained = msgspec.structs.replace(sampling, thinking=thinking), False
    how = answer_format(context, body, tools, wanted.calls, prompt, variables, is_constrained=is_constrained)
    sampling = visible_markers(sampling, how, tools, context.engine.tokenizer)
    identity = Identity.read(context, body, headers, "chatcmpl-")
    sequences = build_sequences(
        context,
        body,
        headers,
        [prompt],
        sampling,
        identity,
        prompt_fields=["messages" if body.get("input_ids") is None else "input_ids"],
        stream=options.stream,
        add_special_tokens=False,
        return_logprob=logprobs,
        top_logprobs_num=top_logprobs,
        takes_session=True,
    )
    tokenizer, weights = context.engine.tokenizer, context.weights.version
    return ChatCall(identity, model, sequences, sampling.n, options, logprobs, tokenizer, now(), weights, how)


class ChatStreamWriter:
    """Writes the chunks of a stream: a role first, then what is new, then a finish chunk for each choice."""

    def __init__(self, call: ChatCall) -> None:
        self._call = call
        count = len(call.sequences)
        self._header = call.header("chat.completion.chunk")
        self._readers = call.readers()
        self._sent_logprobs = [0] * count
        self._newest: list[GenerationOutput | None] = [None] * count
        self._frames: dict[int, FixedFrame] = {}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        matched: int | str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "matched_stop": matched,
        }
        chunk = {**self._header, "choices": [choice]}
        if "tool_calls" in delta:
            chunk["usage"] = None
        if self._call.options.continuous_usage:
            chunk["usage"] = self.usage()
        return chunk

    def _frame(self, index: int) -> FixedFrame:
        """The chunk of a choice that carries text alone."""
        frame = self._frames.get(index)
        if frame is None:
            shape = self._chunk(index, {"reasoning_content": None, "content": FixedFrame.SLOT})
            frame = self._frames[index] = FixedFrame(shape)
        return frame

    def events(self, index: int, output: GenerationOutput) -> Iterator[Any]:
        """The chunks for a new snapshot."""
        first = self._newest[index] is None
        self._newest[index] = output
        if first:
            yield self._chunk(index, {"reasoning_content": None, "role": "assistant", "content": ""})
        reader = self._readers[index]
        deltas = reader.read(output)
        positions = output.output_logprobs[self._sent_logprobs[index] :] if self._call.logprobs else []
        if positions:
            # They belong to the tokens of the snapshot: the first chunk that these make carries them.
            self._sent_logprobs[index] += len(positions)
            first_delta = deltas.pop(0) if deltas else TextDelta("")
            logprobs = chat_logprobs(positions, self._call.tokenizer)
            yield self._chunk(index, delta_object(reader, first_delta), logprobs=logprobs)
        for delta in deltas:
            if isinstance(delta, TextDelta) and not self._call.options.continuous_usage:
                yield self._frame(index).encode(delta.text)
            else:
                yield self._chunk(index, delta_object(reader, delta))
        reason = output.finish_reason
        if reason is not None:
            name, matched = _ending(reader, reason)
            yield self._chunk(index, {"reasoning_content": None}, finish_reason=name, matched=matched)

    def usage(self) -> dict[str, Any]:
        """Usage so far."""
        reasoning = sum(reader.reasoning_tokens for reader in self._readers)
        return total_usage(self._newest, self._call.choices, reasoning)

    def closing_events(self) -> Iterator[Any]:
        """The chunk with the usage and the explanation, when asked for."""
        options = self._call.options
        told = explain_field(options.explain, [output for output in self._newest if output is not None])
        if options.include_usage or told:
            usage = self.usage() if options.include_usage else None
            yield {**self._header, "choices": [], "usage": usage, **told}


def _ending(reader: ChoiceReader, reason: FinishReason | None) -> tuple[str | None, int | str | None]:
    """``finish_reason`` and ``matched_stop`` of a choice."""
    if reason is not None and reader.ends_with_calls(reason):
        return "tool_calls", None
    return finish_name(reason), matched_stop(reason)


def _choice(call: ChatCall, index: int, reader: ChoiceReader, output: GenerationOutput) -> dict[str, Any]:
    message = message_object(reader, reader.read(output))
    name, matched = _ending(reader, output.finish_reason)
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(output.output_logprobs, call.tokenizer) if call.logprobs else None,
        "finish_reason": name,
        "matched_stop": matched,
    }


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    context = context_of(request)
    raw = await read_object(request)
    call = await off_loop(request, read_call, context, raw, request.headers)
    parse_body(raw, ChatBody)
    identity, created = take_over(request, raw, call.sequences, call.identity, call.created)
    call = replace(call, identity=identity, created=created)
    await refuse_endless_texts(context, call.sequences)
    async with session_turns(context, raw, call.sequences, call.choices):
        if call.options.stream:
            merged = MergedStream(context, call.sequences, call.choices)
            return await reply_with_events(request, merged, ChatStreamWriter(call))
        outputs = await collect(context, call.sequences, call.choices)
    readers = call.readers()
    body = {
        **call.header("chat.completion"),
        "choices": [
            _choice(call, index, reader, output)
            for index, (reader, output) in enumerate(zip(readers, outputs, strict=True))
        ],
        "usage": total_usage(outputs, call.choices, sum(reader.reasoning_tokens for reader in readers)),
        "metadata": {"weight_version": call.weight_version},
        **explain_field(call.options.explain, outputs),
    }
    return json_response(body)


def add_chat_routes(app: web.Application) -> None:
    """Register the route of this module."""
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/invocations", chat_completions)
