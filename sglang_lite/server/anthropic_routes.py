"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, as Anthropic's clients call them."""

from __future__ import annotations

import asyncio

from aiohttp import web

from sglang_lite.server.anthropic_format import MessageWriter, message_reply
from sglang_lite.server.anthropic_prompt import chat_body
from sglang_lite.server.bodies import read_object
from sglang_lite.server.chat_prompt import render_messages
from sglang_lite.server.chat_routes import read_call
from sglang_lite.server.context import context_of
from sglang_lite.server.definitions.anthropic import CountTokensBody, MessagesBody
from sglang_lite.server.definitions.base import parse_body
from sglang_lite.server.errors import json_response
from sglang_lite.server.generation import MergedStream, collect
from sglang_lite.server.identity import Identity
from sglang_lite.server.named_events import reply_with_named_events
from sglang_lite.server.off_loop import off_loop
from sglang_lite.server.openai_common import check_model
from sglang_lite.server.session_turns import refuse_session
from sglang_lite.server.text_length import refuse_endless_texts
from sglang_lite.types import RequestError


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    context, raw = context_of(request), await read_object(request)
    body = parse_body(raw, MessagesBody)
    refuse_session(raw)
    identity = Identity.read(context, raw, request.headers, "msg_")
    chat_raw = {**chat_body(raw, body), "rid": identity.base}
    call = await off_loop(request, read_call, context, chat_raw, request.headers)
    await refuse_endless_texts(context, call.sequences)
    if body.stream:
        merged = MergedStream(context, call.sequences)
        return await reply_with_named_events(request, merged, MessageWriter(call, identity.shown))
    (output,) = await collect(context, call.sequences)
    return json_response(message_reply(call, identity.shown, output))


async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens the prompt of a conversation has."""
    context, raw = context_of(request), await read_object(request)
    body = parse_body(raw, CountTokensBody)
    check_model(context, raw)
    tokenizer = context.engine.tokenizer
    if tokenizer is None:
        raise RequestError("messages need a tokenizer; this server runs with --skip-tokenizer-init", field="messages")
    text = await off_loop(request, render_messages, context, chat_body(raw, body))
    ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)
    return json_response({"input_tokens": len(ids)})


def add_anthropic_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    app.router.add_post("/v1/messages", messages)
    app.router.add_post("/v1/messages/count_tokens", count_tokens)
