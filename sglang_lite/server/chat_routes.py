"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from sglang_lite.frontend.openai_sampling import chat_sampling
from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.server import fields
from sglang_lite.server.bodies import read_object
from sglang_lite.server.chat_prompt import chat_prompt
from sglang_lite.server.context import ServerContext, context_of
from sglang_lite.server.errors import json_response
from sglang_lite.server.event_replies import reply_with_events
from sglang_lite.server.fixed_frames import FixedFrame
from sglang_lite.server.generation import MergedStream, collect
from sglang_lite.server.identity import Identity
from sglang_lite.server.openai_common import (
    StreamOptions,
    check_model,
    finish_name,
    matched_stop,
    now,
    total_usage,
)
from sglang_lite.server.openai_logprobs import chat_logprobs
from sglang_lite.server.sequences import build_sequences
from sglang_lite.server.text_length import refuse_endless_texts
from sglang_lite.types import RequestError

_MAX_TOP_LOGPROBS = 128


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

    def header(self, kind: str) -> dict[str, Any]:
        """The fields that open the reply and every chunk."""
        return {"id": self.identity.shown, "object": kind, "created": self.created, "model": self.model}


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
    sampling = chat_sampling(body, vocab_size=context.engine.info.vocab_size, defaults=context.chat_defaults)
    identity = Identity.read(context, body, headers, "chatcmpl-")
    sequences = build_sequences(
        context,
        body,
        headers,
        [chat_prompt(context, body)],
        sampling,
        identity,
        prompt_fields=["messages" if body.get("input_ids") is None else "input_ids"],
        stream=options.stream,
        add_special_tokens=False,
        return_logprob=logprobs,
        top_logprobs_num=top_logprobs,
    )
    tokenizer, weights = context.engine.tokenizer, context.weights.version
    return ChatCall(identity, model, sequences, sampling.n, options, logprobs, tokenizer, now(), weights)


class ChatStreamWriter:
    """Writes the chunks of a stream: a role first, then what is new, then a finish chunk for each choice."""

    def __init__(self, call: ChatCall) -> None:
        self._call = call
        count = len(call.sequences)
        self._header = call.header("chat.completion.chunk")
        self._sent_text = [0] * count
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
        text = output.text[self._sent_text[index] :]
        positions = output.output_logprobs[self._sent_logprobs[index] :] if self._call.logprobs else []
        if text or positions:
            self._sent_text[index] = len(output.text)
            if not positions and not self._call.options.continuous_usage:
                yield self._frame(index).encode(text)
                text = ""
        if text or positions:
            self._sent_logprobs[index] += len(positions)
            logprobs = chat_logprobs(positions, self._call.tokenizer) if positions else None
            yield self._chunk(index, {"reasoning_content": None, "content": text}, logprobs=logprobs)
        reason = output.finish_reason
        if reason is not None:
            delta = {"reasoning_content": None}
            yield self._chunk(index, delta, finish_reason=finish_name(reason), matched=matched_stop(reason))

    def usage(self) -> dict[str, Any]:
        """Usage so far."""
        return total_usage(self._newest, self._call.choices)

    def closing_events(self) -> Iterator[Any]:
        """The usage chunk, when asked for."""
        if self._call.options.include_usage:
            yield {**self._header, "choices": [], "usage": self.usage()}


def _choice(call: ChatCall, index: int, output: GenerationOutput) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": output.text, "reasoning_content": None},
        "logprobs": chat_logprobs(output.output_logprobs, call.tokenizer) if call.logprobs else None,
        "finish_reason": finish_name(output.finish_reason),
        "matched_stop": matched_stop(output.finish_reason),
    }


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    context = context_of(request)
    call = read_call(context, await read_object(request), request.headers)
    await refuse_endless_texts(context, call.sequences)
    if call.options.stream:
        merged = MergedStream(context, call.sequences, call.choices)
        return await reply_with_events(request, merged, ChatStreamWriter(call))
    outputs = await collect(context, call.sequences, call.choices)
    body = {
        **call.header("chat.completion"),
        "choices": [_choice(call, index, output) for index, output in enumerate(outputs)],
        "usage": total_usage(outputs, call.choices),
        "metadata": {"weight_version": call.weight_version},
    }
    return json_response(body)


def add_chat_routes(app: web.Application) -> None:
    """Register the route of this module."""
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/invocations", chat_completions)
