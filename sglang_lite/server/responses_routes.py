"""``/v1/responses``: answers as typed items, stored where the server was started with ``--enable-response-store``."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from aiohttp import web

from sglang_lite.server.bodies import read_object
from sglang_lite.server.chat_routes import read_call
from sglang_lite.server.context import ServerContext, context_of
from sglang_lite.server.definitions.base import parse_body
from sglang_lite.server.definitions.responses import ResponsesBody
from sglang_lite.server.errors import json_response
from sglang_lite.server.generation import MergedStream, collect
from sglang_lite.server.identity import ID_FIELDS, Identity
from sglang_lite.server.named_events import reply_with_named_events
from sglang_lite.server.off_loop import off_loop
from sglang_lite.server.peers import CONVERSATION, is_from_peer
from sglang_lite.server.response_store import ResponseStore, StoredResponse, already_stored
from sglang_lite.server.responses_format import ResponseCall, ResponseWriter, whole_response
from sglang_lite.server.responses_prompt import chat_body, input_messages, item_messages, refuse_unserved
from sglang_lite.server.session_turns import refuse_session
from sglang_lite.server.text_length import refuse_endless_texts
from sglang_lite.types import RequestError

logger = logging.getLogger(__name__)

STORE: web.AppKey[ResponseStore] = web.AppKey("responses", ResponseStore)


def _is_named(raw: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    """Whether the client names the response."""
    return any(raw.get(name) is not None for name in ID_FIELDS) or bool(headers.get("X-Request-Id"))


def _identity(context: ServerContext, raw: Mapping[str, Any], headers: Mapping[str, str]) -> Identity:
    if _is_named(raw, headers):
        return Identity.read(context, raw, headers, "resp_")
    made = f"resp_{secrets.token_hex(16)}"  # whoever knows it may read the response: it must not be guessed
    return Identity(made, made)


def _store(request: web.Request, what: str, *, field: str | None = None) -> ResponseStore:
    """The store.

    Args:
        field: the field that needs it, None where the route itself does.

    Raises:
        RequestError: the server keeps no responses: 400 for a field, 501 for a route.
    """
    if not context_of(request).config.enable_response_store:
        message = f"{what} needs a server that was started with --enable-response-store"
        raise RequestError(message, status=400 if field else 501, field=field)
    return request.app[STORE]


class _Conversation(msgspec.Struct, frozen=True):
    """What a request that continues a response needs of it."""

    messages: list[dict[str, Any]]
    is_running: bool


async def _conversation(request: web.Request, response_id: str) -> _Conversation:
    """The conversation of a response that this front has, or another one.

    Raises:
        RequestError: 404, nobody has it; 400, the server keeps none.
    """
    name = "previous_response_id"
    store, peers = _store(request, name, field=name), context_of(request).peers
    if peers is not None and response_id not in store:
        elsewhere = await peers.find(request, CONVERSATION + quote(response_id, safe=""))
        if elsewhere is not None:
            return msgspec.json.decode(elsewhere, type=_Conversation)
    found = store.get(response_id, name)
    return _Conversation(found.messages, found.is_running)


async def _check_new(request: web.Request, response_id: str) -> None:
    """Refuse the id of a response that this front has stored, or another one."""
    store, peers = request.app[STORE], context_of(request).peers
    store.check_new(response_id)
    if peers is not None and await peers.find(request, CONVERSATION + quote(response_id, safe="")) is not None:
        raise already_stored(response_id)


async def conversation(request: web.Request) -> web.Response:
    """For another front of this server: the conversation of a response that is stored here."""
    if not is_from_peer(request):
        raise web.HTTPNotFound
    found = request.app[STORE].get(request.match_info["response"])
    return json_response(_Conversation(found.messages, found.is_running))


async def create(request: web.Request) -> web.StreamResponse:
    """Answer an input."""
    context, raw = context_of(request), await read_object(request)
    body = parse_body(raw, ResponsesBody)
    refuse_unserved(body)
    refuse_session(raw)
    if body.background and body.stream:
        raise RequestError("background cannot be combined with stream", field="background")
    history: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        previous = await _conversation(request, body.previous_response_id)
        if previous.is_running:
            raise RequestError("the previous response has not ended yet", field="previous_response_id")
        history = previous.messages
    identity = _identity(context, raw, request.headers)
    is_stored = context.config.enable_response_store and body.store is not False
    if body.background and not is_stored:
        _store(request, "background", field="background")
        raise RequestError("background needs store to be true", field="background")
    if is_stored and _is_named(raw, request.headers):
        await _check_new(request, identity.shown)
    chat_raw = {**chat_body(raw, body, history), "rid": identity.base}
    chat = await off_loop(request, read_call, context, chat_raw, request.headers)
    await refuse_endless_texts(context, chat.sequences)
    call = ResponseCall(identity.shown, chat, body, is_stored)
    messages = [*history, *input_messages(body)]
    if body.background:
        return _start(context, request.app[STORE], call, messages)
    if body.stream:
        writer = ResponseWriter(call)
        reply = await reply_with_named_events(request, MergedStream(context, chat.sequences), writer)
        result = writer.result
    else:
        (output,) = await collect(context, chat.sequences)
        result = whole_response(call, output)
        reply = json_response(result)
    if is_stored and result is not None:
        request.app[STORE].put(_stored(result, messages))
    return reply


def _stored(result: dict[str, Any], messages: list[dict[str, Any]]) -> StoredResponse:
    return StoredResponse(result, [*messages, *item_messages(result["output"])])


def _start(
    context: ServerContext, store: ResponseStore, call: ResponseCall, messages: list[dict[str, Any]]
) -> web.Response:
    """Compute a response behind the reply."""
    stored = StoredResponse(call.response("in_progress", []), messages)

    async def run() -> None:
        try:
            with context.generation():
                (output,) = await collect(context, call.chat.sequences)
            stored.response = whole_response(call, output)
            stored.messages = [*messages, *item_messages(stored.response["output"])]
        except RequestError as error:
            stored.response = call.failed(error.message, error.status)
        except Exception as error:  # nobody waits for this task: the response has to say what happened
            logger.exception("response %s failed", call.shown_id)
            stored.response = call.failed(f"Internal server error: {type(error).__name__}", 500)
        store.put(stored)

    stored.task = asyncio.create_task(run())
    store.put(stored)
    return json_response(stored.response)


async def retrieve(request: web.Request) -> web.Response:
    """A stored response as it stands."""
    stored = _store(request, "looking a response up").get(request.match_info["response"])
    return json_response(stored.response)


async def cancel(request: web.Request) -> web.Response:
    """End a response that is computed in the background; one that has ended stays as it is."""
    stored = _store(request, "cancelling a response").get(request.match_info["response"])
    if stored.task is None:
        raise RequestError("only responses that were created with background can be cancelled")
    if stored.is_running:
        stored.task.cancel()
        await asyncio.gather(stored.task, return_exceptions=True)
        stored.response = {**stored.response, "status": "cancelled"}
    return json_response(stored.response)


async def delete(request: web.Request) -> web.Response:
    """Forget a stored response."""
    name = request.match_info["response"]
    _store(request, "deleting a response").delete(name)
    return json_response({"id": name, "object": "response", "deleted": True})


def add_responses_routes(app: web.Application) -> None:
    """Register the routes of this module and what they store."""
    store = app[STORE] = ResponseStore()
    app.on_cleanup.append(store.close)
    app.router.add_post("/v1/responses", create)
    app.router.add_get("/v1/responses/{response}", retrieve)
    app.router.add_delete("/v1/responses/{response}", delete)
    app.router.add_post("/v1/responses/{response}/cancel", cancel)
    app.router.add_get(CONVERSATION + "{response}", conversation)
