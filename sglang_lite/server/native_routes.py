"""``POST /generate`` and ``PUT /generate``."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from sglang_lite.server.bodies import read_object
from sglang_lite.server.context import context_of
from sglang_lite.server.definitions.base import parse_body
from sglang_lite.server.definitions.native import GenerateBody
from sglang_lite.server.errors import json_response
from sglang_lite.server.event_replies import reply_with_events
from sglang_lite.server.explain_routes import wants_explanation
from sglang_lite.server.generation import MergedStream, collect
from sglang_lite.server.identity import Identity
from sglang_lite.server.native_format import NativeFormat, NativeWriter
from sglang_lite.server.native_parse import read_call
from sglang_lite.server.off_loop import off_loop
from sglang_lite.server.resumable import take_over
from sglang_lite.server.session_turns import session_turns
from sglang_lite.server.text_length import refuse_endless_texts


async def generate(request: web.Request) -> web.StreamResponse:
    """Generate for one prompt or a batch."""
    reply = await answer(request, await read_object(request))
    return reply if isinstance(reply, web.StreamResponse) else json_response(reply)


async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | dict[str, Any] | list[Any]:
    """The reply to a body of ``/generate``: an object, a list for a batch, or a stream that was sent."""
    context = context_of(request)
    # Vectors are many numbers; other bodies are read in microseconds.
    reading = off_loop(request, read_call, context, body, request.headers) if body.get("input_embeds") else None
    call = read_call(context, body, request.headers) if reading is None else await reading
    parse_body(body, GenerateBody)
    name = call.requests[0].request_id
    call.requests[0].request_id = take_over(request, body, call.requests, Identity(name, name), 0)[0].shown
    await refuse_endless_texts(context, call.requests)
    form = NativeFormat(
        tokenizer=context.engine.tokenizer,
        weight_version=context.weights.version,
        is_batch=call.is_batch,
        incremental=call.stream and context.config.incremental_streaming_output,
        text_in_logprobs=call.text_in_logprobs,
        return_prompt_token_ids=call.return_prompt_token_ids,
        with_timings=context.config.enable_metrics,
        explain=wants_explanation(body),
    )
    async with session_turns(context, body, call.requests, call.choices):
        writer = NativeWriter(form, call.requests, call.hidden)
        if call.stream:
            return await reply_with_events(request, MergedStream(context, call.requests, call.choices), writer)
        outputs = await collect(context, call.requests, call.choices)
    results = [writer.result(index, output) for index, output in enumerate(outputs)]
    return results if call.is_batch else results[0]


def add_native_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    app.router.add_post("/generate", generate)
    app.router.add_put("/generate", generate)
