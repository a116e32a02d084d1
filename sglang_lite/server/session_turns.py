"""Requests that continue a session: what the fields say, and the turn of each sequence for as long as it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sglang_lite.engine.tokenization import INLINE_CHARACTERS
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.frontend.request_ids import parse_request_id
from sglang_lite.frontend.session import CountCharacters, SessionParams, Turn
from sglang_lite.frontend.validation import parse_token_ids
from sglang_lite.server import fields
from sglang_lite.server.context import ServerContext
from sglang_lite.types import RequestError

ABORT_SECONDS = 5.0
"""How long a replaced request gets to end before what it has told so far counts as its output."""


def read_session_id(body: Mapping[str, Any]) -> str:
    """``session_id``, or the session of ``session_params``: requests with one go to the same replica. Empty for none.

    ``session_id`` alone keeps nothing and leaves the prompt as it is.

    Raises:
        RequestError: a wrong type, or both fields are set.
    """
    value = body.get("session_id")
    if isinstance(value, list) and not any(value):
        value = None
    params = read_session_params(body)
    if not value:
        return params.id if params is not None else ""
    if params is not None:
        raise RequestError("session_id and session_params cannot both be set.", field="session_id")
    return parse_request_id(value, "session_id")


def read_session_params(body: Mapping[str, Any]) -> SessionParams | None:
    """``session_params``, None when there are none or they name no session.

    Raises:
        RequestError: a wrong type.
    """
    if isinstance(body.get("session_params"), list) and not any(body["session_params"]):
        return None
    raw = fields.mapping(body, "session_params")
    if raw.get("id") is None:
        return None
    rid = raw.get("rid")
    return SessionParams(
        id=parse_request_id(raw["id"], "session_params.id"),
        rid=None if rid is None else parse_request_id(rid, "session_params.rid"),
        offset=fields.integer(raw, "offset"),
        replace=fields.boolean(raw, "replace"),
        drop_previous_output=fields.boolean(raw, "drop_previous_output"),
    )


def refuse_session(body: Mapping[str, Any]) -> None:
    """For routes whose prompts continue nothing.

    Raises:
        RequestError: the request names a session to continue.
    """
    if read_session_params(body) is not None:
        raise RequestError(
            "session_params continue a session on /generate, /v1/completions and /v1/chat/completions only; leave "
            "them out",
            field="session_params",
        )


@asynccontextmanager
async def session_turns(
    context: ServerContext, body: Mapping[str, Any], requests: Sequence[GenerateRequest], choices: int
) -> AsyncIterator[None]:
    """Put what the session holds in front of each prompt; the sequences belong to the session while this is open.

    Args:
        requests: of one call, prompt-major; choices: sequences of each prompt.

    Raises:
        RequestError: see ``SessionStore.begin``; or several choices.
    """
    params = read_session_params(body)
    if params is None:
        yield
        return
    _check_choices(params, len(requests), choices)
    turns: list[Turn] = []
    try:
        for request in requests:
            turns.append(await _enter(context, params, request))
        yield
    except RequestError:
        for turn in turns:
            if not turn.was_seen:
                context.sessions.discard(turn)
        raise
    finally:
        for turn in turns:
            turn.end()


def _check_choices(params: SessionParams, sequences: int, choices: int) -> None:
    if choices > 1:
        raise RequestError(
            f"a request of a session has one choice for each prompt, got {choices}; send several requests that "
            "continue the same rid",
            field="n",
        )
    if params.replace and sequences > 1:
        raise RequestError("session_params.replace needs one prompt: a batch would replace its own", field="replace")


async def _enter(context: ServerContext, params: SessionParams, request: GenerateRequest) -> Turn:
    store, tokenizer = context.sessions, context.engine.tokenizer
    text, ids = request.text, await _token_ids(context, request)
    await _end_replaced(context, params)
    count: CountCharacters = (lambda tokens: 0) if tokenizer is None else lambda tokens: len(tokenizer.decode(tokens))
    begin_token = None if tokenizer is None else tokenizer.bos_token_id
    turn = store.begin(request.request_id, params, ids, text, count, begin_token=begin_token)
    request.text, request.turn = None, turn
    request.input_ids = turn.history(turn.input_length).tolist()
    return turn


async def _token_ids(context: ServerContext, request: GenerateRequest) -> Sequence[int]:
    """The new input alone."""
    tokenizer = context.engine.tokenizer
    if request.text is None:
        if not request.input_ids:
            return []
        vocab_size = context.engine.info.vocab_size
        return parse_token_ids(request.input_ids, vocab_size=vocab_size, field=request.prompt_field)
    if tokenizer is None:
        raise RequestError("the server has no tokenizer (--skip-tokenizer-init): send input_ids", field="text")
    text, special = request.text, request.add_special_tokens
    if len(text) <= INLINE_CHARACTERS:
        return tokenizer.encode(text, add_special_tokens=special)
    return await asyncio.to_thread(lambda: tokenizer.encode(text, add_special_tokens=special))


async def _end_replaced(context: ServerContext, params: SessionParams) -> None:
    """Abort what the request replaces, and wait for its end: its output may be what is continued."""
    running = context.sessions.to_abort(params)
    for turn in running:
        context.engine.abort(turn.request_id, exact=True)
    if running:
        # One whose reader has stalled ends later; it is continued as far as it was read.
        ends = [asyncio.ensure_future(turn.ended.wait()) for turn in running]
        try:
            await asyncio.wait(ends, timeout=ABORT_SECONDS)
        finally:
            for end in ends:
                end.cancel()
