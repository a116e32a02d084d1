"""Refusing texts that are far too long without tokenizing all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.server.context import ServerContext
from sglang_lite.types import RequestError

SUSPECT_CHARACTERS_PER_TOKEN = 8
"""A text with more characters than this times the context length is looked at before it is tokenized. Ordinary text
has three to five characters a token, so almost every such text is too long."""


async def refuse_endless_texts(context: ServerContext, requests: Iterable[GenerateRequest]) -> None:
    """Tokenize the beginning of suspiciously long texts.

    Megabytes of text would keep a tokenizer thread busy for seconds, only to be refused.

    Raises:
        RequestError: the beginning of a text alone has more tokens than the context.
    """
    tokenizer, limit = context.engine.tokenizer, context.engine.info.context_length
    if tokenizer is None or context.config.allow_auto_truncate:
        return
    suspect = limit * SUSPECT_CHARACTERS_PER_TOKEN
    fields = {
        request.text: request.prompt_field
        for request in requests
        if request.text is not None and len(request.text) > suspect
    }
    for text, field in fields.items():
        ids = await asyncio.to_thread(tokenizer.encode, text[:suspect])
        if len(ids) > limit:
            raise RequestError(
                f"The input (more than {len(ids)} tokens) is longer than the model's context length ({limit} tokens).",
                field=field,
            )
