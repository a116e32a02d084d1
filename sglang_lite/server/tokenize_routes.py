"""``/tokenize`` and ``/detokenize``, also under ``/v1``."""

from __future__ import annotations

import asyncio

from aiohttp import web

from sglang_lite.frontend.fields import wrong_type
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.frontend.validation import check_token_ids
from sglang_lite.server import fields
from sglang_lite.server.bodies import read_object
from sglang_lite.server.chat_prompt import render_messages
from sglang_lite.server.context import ServerContext, context_of
from sglang_lite.server.errors import json_response
from sglang_lite.server.off_loop import off_loop
from sglang_lite.types import RequestError


def _tokenizer(context: ServerContext) -> Tokenizer:
    tokenizer = context.engine.tokenizer
    if tokenizer is None:
        raise RequestError("this server runs with --skip-tokenizer-init and has no tokenizer")
    return tokenizer


async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a prompt, of several, or of a conversation."""
    context, body = context_of(request), await read_object(request)
    tokenizer, prompt, messages = _tokenizer(context), body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        raise RequestError("Exactly one of 'prompt' or 'messages' must be provided.", field="prompt")
    special = fields.boolean(body, "add_special_tokens", messages is None)
    texts = [await off_loop(request, render_messages, context, body)] if messages is not None else prompt
    is_batch = isinstance(texts, list) and messages is None
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
        wrong_type("prompt", prompt, "a string or a list of strings")
    ids = await asyncio.to_thread(tokenizer.encode_batch, texts, add_special_tokens=special)
    return json_response(
        {
            "tokens": ids if is_batch else ids[0],
            "count": [len(item) for item in ids] if is_batch else len(ids[0]),
            "max_model_len": context.engine.info.context_length,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """Text of one list of token ids, or of several."""
    context, body = context_of(request), await read_object(request)
    tokenizer, tokens = _tokenizer(context), body.get("tokens")
    skip = fields.boolean(body, "skip_special_tokens", True)
    if not isinstance(tokens, list):
        wrong_type("tokens", tokens, "a list of token ids or a list of such lists")
    is_batch = bool(tokens) and all(isinstance(item, list) for item in tokens)
    lists: list[list[int]] = tokens if is_batch else [tokens]
    if not all(fields.is_integer_list(item) for item in lists):
        wrong_type("tokens", tokens, "a list of token ids or a list of such lists")
    for item in lists:
        check_token_ids("tokens", item, tokenizer.vocab_size)
    texts = [await asyncio.to_thread(tokenizer.decode, item, skip_special_tokens=skip) for item in lists]
    return json_response({"text": texts if is_batch else texts[0]})


def add_tokenize_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    for prefix in ("", "/v1"):
        app.router.add_post(f"{prefix}/tokenize", tokenize)
        app.router.add_post(f"{prefix}/detokenize", detokenize)
