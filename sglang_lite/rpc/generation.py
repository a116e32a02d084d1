"""Generation for both services: the request path of ``/generate``, with messages in place of its JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from multidict import CIMultiDict

from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.rpc.inner import headers_of
from sglang_lite.rpc.status import Call
from sglang_lite.server.auth import may_pass, presented_key
from sglang_lite.server.context import ServerContext
from sglang_lite.server.generation import MergedStream
from sglang_lite.server.middleware import admit
from sglang_lite.server.native_parse import read_call
from sglang_lite.server.text_length import refuse_endless_texts
from sglang_lite.types import RequestError


def exact(value: float) -> float:
    """The number that a client wrote: the shortest decimal with this 32-bit value. 0.1 arrives as 0.100000001."""
    return float(str(np.float32(value)))


def prompt_ids(context: ServerContext, ids: Sequence[int], call: Call) -> list[int]:
    """The token ids of a message as a list; messages have room for far more than any context.

    Raises:
        RequestError: they are longer than the context, or the key is wrong.
    """
    limit = context.engine.info.context_length
    if len(ids) > limit and not context.config.allow_auto_truncate:
        check_key(context, headers_of(call), "/generate")
        message = f"The input ({len(ids)} tokens) is longer than the model's context length ({limit} tokens)."
        raise RequestError(message, field="input_ids")
    return list(ids)


def check_key(context: ServerContext, headers: Mapping[str, str], path: str) -> None:
    """Check the key of a call like that of a call of ``path``.

    Raises:
        RequestError: 401.
    """
    config = context.config
    tenants = [] if context.tenants is None else context.tenants.keys
    if not may_pass("POST", path, presented_key(headers), config.api_key, config.admin_api_key, tenants):
        raise RequestError("Unauthorized", status=401)


class Sequences:
    """The sequences of one call: what is new of each since its last message.

    Attributes:
        requests: as the engine got them, one a choice.
    """

    def __init__(self, requests: list[GenerateRequest], stream: MergedStream) -> None:
        self.requests = requests
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[tuple[int, GenerationOutput]]:
        return self._stream


@asynccontextmanager
async def sequences(
    context: ServerContext, body: dict[str, Any], headers: CIMultiDict[str]
) -> AsyncIterator[Sequences]:
    """Run the sequences that ``body``, a body of ``/generate``, asks for; leaving it aborts what still runs.

    Raises:
        RequestError: what the call asks for is refused, as ``/generate`` does.
    """
    check_key(context, headers, "/generate")
    admit(context, headers)
    with context.generation(context.config.max_concurrent_requests):
        call = read_call(context, body, headers)
        await refuse_endless_texts(context, call.requests)
        async with MergedStream(context, call.requests, call.choices) as stream:
            yield Sequences(call.requests, stream)


async def send(context: ServerContext, call: Call, message: Any) -> None:
    """Send a message; returns when the transport has taken it, so that a slow reader slows the sender.

    Raises:
        RequestError: the client has read nothing for ``--stream-stall-timeout`` seconds.
    """
    try:
        async with asyncio.timeout(context.config.stream_stall_timeout or None):
            await call.write(message)
    except TimeoutError:
        raise RequestError("the client has stopped reading", status=504) from None
