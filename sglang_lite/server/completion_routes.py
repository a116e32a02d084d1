"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from aiohttp import web

from sglang_lite.frontend.openai_sampling import completion_sampling
from sglang_lite.frontend.request import FinishReason, GenerateRequest, GenerationOutput, TokenLogprobs
from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.frontend.validation import MAX_SAMPLES
from sglang_lite.server import fields
from sglang_lite.server.bodies import read_object
from sglang_lite.server.context import ServerContext, context_of
from sglang_lite.server.definitions.base import parse_body
from sglang_lite.server.definitions.openai import CompletionBody
from sglang_lite.server.errors import json_response
from sglang_lite.server.event_replies import reply_with_events
from sglang_lite.server.explain_routes import explain_field
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
from sglang_lite.server.openai_logprobs import completion_logprobs
from sglang_lite.server.prompts import prompt_fields, read_prompts
from sglang_lite.server.resumable import take_over
from sglang_lite.server.sequences import Prompt, build_sequences
from sglang_lite.server.session_turns import read_session_params, session_turns
from sglang_lite.server.text_length import refuse_endless_texts
from sglang_lite.server.token_text import OffsetCounter, token_bytes
from sglang_lite.types import RequestError, SamplingParams

_MAX_TOP_LOGPROBS = LIMITS.openai_top_logprobs


@dataclass(slots=True, frozen=True)
class CompletionCall:
    """One request: its sequences and how the reply is written.

    Attributes:
        prompt_texts: text of each prompt for ``echo``, else empty strings.
        choices: sequences of each prompt.
        logprobs: alternatives per position; None when no log-probabilities are wanted.
        wanted: choices of each prompt that are shown: the most probable ones (``best_of``).
    """

    identity: Identity
    model: str
    sequences: list[GenerateRequest]
    choices: int
    options: StreamOptions
    prompt_texts: list[str]
    echo: bool
    logprobs: int | None
    wanted: int
    tokenizer: Tokenizer | None
    created: int
    weight_version: str

    def header(self) -> dict[str, Any]:
        """The fields that open the reply and every chunk."""
        return {"id": self.identity.shown, "object": "text_completion", "created": self.created, "model": self.model}

    def prompt_text(self, index: int) -> str:
        """The echoed prompt of sequence ``index``."""
        return self.prompt_texts[index // self.choices]


def read_call(context: ServerContext, body: dict[str, Any], headers: Mapping[str, str]) -> CompletionCall:
    """Check a request body.

    Raises:
        RequestError: a field is wrong.
    """
    model, options = check_model(context, body), StreamOptions.read(body)
    prompts, echo = read_prompts(body.get("prompt")), fields.boolean(body, "echo")
    logprobs = fields.integer(body, "logprobs", minimum=0, maximum=_MAX_TOP_LOGPROBS)
    tokenizer = context.engine.tokenizer
    if echo and read_session_params(body) is not None:
        raise RequestError("echo shows the prompt of one request; leave it out with session_params", field="echo")
    if echo and tokenizer is None:
        raise RequestError("echo needs a tokenizer; this server runs with --skip-tokenizer-init", field="echo")
    sampling = completion_sampling(body, vocab_size=context.engine.info.vocab_size, defaults=context.native_defaults)
    wanted, sampling = sampling.n, _with_candidates(sampling, body, options)
    identity = Identity.read(context, body, headers, "cmpl-")
    sequences = build_sequences(
        context,
        body,
        headers,
        prompts,
        sampling,
        identity,
        prompt_fields=prompt_fields(body["prompt"], len(prompts)),
        stream=options.stream,
        return_logprob=logprobs is not None or wanted < sampling.n,
        logprob_start_len=0 if echo and logprobs is not None else -1,
        top_logprobs_num=logprobs or 0,
        takes_session=True,
    )
    for sequence in sequences:
        sequence.limit_is_default = body.get("max_tokens") is None
    texts = [_echo_text(prompt, tokenizer) if echo else "" for prompt in prompts]
    weights = context.weights.version
    return CompletionCall(
        identity, model, sequences, sampling.n, options, texts, echo, logprobs, wanted, tokenizer, now(), weights
    )


def _with_candidates(sampling: SamplingParams, body: Mapping[str, Any], options: StreamOptions) -> SamplingParams:
    """``sampling`` with as many sequences as ``best_of`` asks for."""
    best_of = fields.integer(body, "best_of", minimum=sampling.n, maximum=MAX_SAMPLES)
    if best_of is None or best_of == sampling.n:
        return sampling
    if options.stream:
        raise RequestError("best_of above n cannot be streamed: the best are known at the end", field="best_of")
    return msgspec.structs.replace(sampling, n=best_of)


def _best(
    call: CompletionCall, outputs: Sequence[GenerationOutput]
) -> tuple[CompletionCall, Sequence[GenerationOutput]]:
    """The choices of each prompt with the highest log-probability per token, the best first."""
    if call.wanted == call.choices:
        return call, outputs
    kept: list[int] = []
    for first in range(0, len(outputs), call.choices):
        candidates = range(first, first + call.choices)
        kept += sorted(candidates, key=lambda index: (-_mean_logprob(outputs[index]), index))[: call.wanted]
    shown = replace(call, sequences=[call.sequences[index] for index in kept], choices=call.wanted)
    return shown, [outputs[index] for index in kept]


def _mean_logprob(output: GenerationOutput) -> float:
    values = [position.logprob or 0.0 for position in output.output_logprobs]
    return sum(values) / len(values) if values else 0.0


def _echo_text(prompt: Prompt, tokenizer: Tokenizer | None) -> str:
    if isinstance(prompt, str):
        return prompt
    if tokenizer is None or any(not 0 <= token < tokenizer.vocab_size for token in prompt):
        return ""  # the engine refuses the prompt with the range of the vocabulary
    return tokenizer.decode(prompt, skip_special_tokens=True)


def _text_choice(
    index: int, text: str, logprobs: dict[str, Any] | None = None, reason: FinishReason | None = None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_name(reason),
        "matched_stop": matched_stop(reason),
    }


class CompletionWriter:
    """Writes choices: whole ones, or what is new since the last event of each."""

    def __init__(self, call: CompletionCall) -> None:
        self._call = call
        count = len(call.sequences)
        self._sent_text = [0] * count
        self._sent_logprobs = [0] * count
        # Behind the prompt, also where its scores are not here: on a decode server, whose prefill server has them.
        self._offsets = [OffsetCounter(len(call.prompt_text(index))) for index in range(count)]
        self._newest: list[GenerationOutput | None] = [None] * count
        self._is_plain = call.logprobs is None and not call.options.continuous_usage
        self._frames: dict[int, FixedFrame] = {}

    def _new_logprobs(self, index: int, output: GenerationOutput) -> dict[str, Any] | None:
        call = self._call
        if call.logprobs is None:
            return None
        new = list(output.output_logprobs[self._sent_logprobs[index] :])
        self._sent_logprobs[index] += len(new)
        prompt = output.input_logprobs if call.echo and self._newest[index] is None else []
        offsets = [*self._prompt_offsets(index, prompt), *self._output_offsets(index, new)]
        return completion_logprobs([*prompt, *new], call.tokenizer, offsets, with_top=call.logprobs > 0)

    def _prompt_offsets(self, index: int, positions: Sequence[TokenLogprobs]) -> Iterator[int]:
        """Offsets in the echoed text. It holds a special token only where the client wrote it out."""
        counter, text, tokenizer = self._offsets[index], self._call.prompt_text(index), self._call.tokenizer
        counter.characters = 0 if positions else counter.characters
        for position in positions:
            piece = token_bytes(tokenizer, position.token_id)
            is_special = tokenizer is not None and position.token_id in tokenizer.special_ids
            if is_special and not text.startswith(piece.decode(errors="replace"), counter.characters):
                yield counter.characters
            else:
                yield counter.next(piece)
        if positions:
            # Vocabularies may spell a blank before the first word that the text does not have.
            counter.characters = len(text)

    def _output_offsets(self, index: int, positions: Sequence[TokenLogprobs]) -> Iterator[int]:
        call, counter = self._call, self._offsets[index]
        skipped: Collection[int] = ()
        if call.tokenizer is not None and call.sequences[index].sampling.skip_special_tokens:
            skipped = call.tokenizer.special_ids
        for position in positions:
            if position.token_id in skipped:
                yield counter.characters
            else:
                yield counter.next(token_bytes(call.tokenizer, position.token_id))

    def choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        """What ``output`` adds to choice ``index``."""
        logprobs = self._new_logprobs(index, output)
        text = output.text[self._sent_text[index] :]
        if self._newest[index] is None:
            text = self._call.prompt_text(index) + text
        self._sent_text[index] = len(output.text)
        self._newest[index] = output
        return _text_choice(index, text, logprobs, output.finish_reason)

    def usage(self) -> dict[str, Any]:
        """Usage so far."""
        return total_usage(self._newest, self._call.choices)

    def events(self, index: int, output: GenerationOutput) -> Iterator[Any]:
        """One chunk, unless nothing is new."""
        nothing_new = len(output.text) == self._sent_text[index] and (
            self._call.logprobs is None or len(output.output_logprobs) == self._sent_logprobs[index]
        )
        if output.finish_reason is None and nothing_new:
            return
        if self._is_plain and output.finish_reason is None and self._newest[index] is not None:
            frame = self._frames.get(index)
            if frame is None:
                frame = self._frames[index] = FixedFrame(self._chunk(_text_choice(index, FixedFrame.SLOT)))
            text = output.text[self._sent_text[index] :]
            self._sent_text[index] = len(output.text)
            self._newest[index] = output
            yield frame.encode(text)
            return
        yield self._chunk(self.choice(index, output))

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = self.usage() if self._call.options.continuous_usage else None
        return {**self._call.header(), "choices": [choice], "usage": usage}

    def closing_events(self) -> Iterator[Any]:
        """The chunk with the usage and the explanation, when asked for."""
        options = self._call.options
        told = explain_field(options.explain, [output for output in self._newest if output is not None])
        if options.include_usage or told:
            usage = self.usage() if options.include_usage else None
            yield {**self._call.header(), "choices": [], "usage": usage, **told}


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one or several prompts."""
    context = context_of(request)
    raw = await read_object(request)
    call = read_call(context, raw, request.headers)
    parse_body(raw, CompletionBody)
    identity, created = take_over(request, raw, call.sequences, call.identity, call.created)
    call = replace(call, identity=identity, created=created)
    await refuse_endless_texts(context, call.sequences)
    async with session_turns(context, raw, call.sequences, call.choices):
        if call.options.stream:
            merged = MergedStream(context, call.sequences, call.choices)
            return await reply_with_events(request, merged, CompletionWriter(call))
        outputs = await collect(context, call.sequences, call.choices)
    shown, chosen = _best(call, outputs)
    writer = CompletionWriter(shown)
    body = {
        **call.header(),
        "choices": [writer.choice(index, output) for index, output in enumerate(chosen)],
        "usage": total_usage(outputs, call.choices),
        "metadata": {"weight_version": call.weight_version},
        **explain_field(call.options.explain, outputs),
    }
    return json_response(body)


def add_completion_routes(app: web.Application) -> None:
    """Register the route of this module."""
    app.router.add_post("/v1/completions", completions)
