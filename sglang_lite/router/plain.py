"""Small work that any worker does: tokens of a text, text of tokens, parsing of answers."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from sglang_lite.router.body import NOT_READ
from sglang_lite.router.call import CALL_ID, forwarded_headers
from sglang_lite.router.context import CONTEXT
from sglang_lite.router.errors import NO_ATTEMPT, NOT_AN_OBJECT, UNREACHABLE, RouterError, too_slow
from sglang_lite.router.exchange import Reply, whole
from sglang_lite.router.lease import Lease
from sglang_lite.router.routes import PLAIN
from sglang_lite.router.upstream import check_status
from sglang_lite.router.workers import Worker, usable

_ATTEMPTS = 3
_Body = TypeVar("_Body", bound=msgspec.Struct)


class Tokenize(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Body of ``/v1/tokenize``."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None


class Detokenize(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``/v1/detokenize``."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


async def pass_on(request: web.Request) -> web.Response:
    """The answer of any worker of the model, as it is."""
    data = await request.read()
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
    except NOT_READ:
        raise RouterError("bad_request", NOT_AN_OBJECT) from None
    model = fields.get("model")
    path = PLAIN[request.path] + (f"?{request.query_string}" if request.query_string else "")
    reply = await ask_any(request, path, data, model if isinstance(model, str) else None)
    return whole(reply, request[CALL_ID])


async def tokenize(request: web.Request) -> web.Response:
    """``{model, prompt}`` to ``{model, tokens, count}``."""
    wanted = _read(await request.read(), Tokenize)
    reply = await ask_any(request, "/v1/tokenize", msgspec.json.encode(wanted), wanted.model)
    return _shaped(request, reply, wanted.model, ("tokens", "count"))


async def detokenize(request: web.Request) -> web.Response:
    """``{model, tokens, skip_special_tokens}`` to ``{model, text}``; special tokens are shown unless told."""
    wanted = _read(await request.read(), Detokenize)
    reply = await ask_any(request, "/v1/detokenize", msgspec.json.encode(wanted), wanted.model)
    return _shaped(request, reply, wanted.model, ("text",))


async def ask_any(request: web.Request, path: str, data: bytes, model: str | None) -> Reply:
    """The answer of the least loaded worker of ``model``; another one is asked where it cannot be reached.

    Raises:
        RouterError: no worker is there, or none of three could be reached.
    """
    context = request.app[CONTEXT]
    workers = usable(context.registry.of_model(model), context.now, "no_healthy_workers")
    failure = RouterError("internal_error", NO_ATTEMPT)
    for worker in sorted(workers, key=lambda one: one.load)[:_ATTEMPTS]:
        async with Lease(context, worker) as lease:
            try:
                reply = await _ask(request, worker, path, data)
            except RouterError as error:
                lease.judge(False)
                failure = error
                continue
            lease.judge(reply.status < 500)
            return reply
    raise failure


async def _ask(request: web.Request, worker: Worker, path: str, data: bytes) -> Reply:
    context = request.app[CONTEXT]
    headers = forwarded_headers(request, request[CALL_ID])
    headers["content-type"] = "application/json"  # it was read as that, and may be another body than the client's
    if worker.api_key:
        headers["authorization"] = f"Bearer {worker.api_key}"
    try:
        async with (
            asyncio.timeout(context.options.request_timeout_secs) as limit,
            context.request(worker, "POST", path, data=data, headers=headers) as response,
        ):
            check_status(response.status)
            body = await response.read()
            return Reply(
                response.status, {"content-type": response.headers.get("content-type", "application/json")}, body
            )
    except TimeoutError:
        if not limit.expired():
            raise  # the lease ran out
        raise RouterError("upstream_timeout", too_slow(context.options.request_timeout_secs)) from None
    except (aiohttp.ClientError, ConnectionError):
        raise RouterError("upstream_unreachable", UNREACHABLE) from None


def _read(data: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        if "unknown field" in str(error):
            raise RouterError("unknown_field", str(error)) from None
        raise RouterError("bad_request", str(error)) from None
    except NOT_READ:
        raise RouterError("bad_request", NOT_AN_OBJECT) from None


def _shaped(request: web.Request, reply: Reply, model: str | None, names: tuple[str, ...]) -> web.Response:
    """The fields ``names`` of a good answer with the model's name; any other answer as it is."""
    if reply.status != 200:
        return whole(reply, request[CALL_ID])
    try:
        answer = msgspec.json.decode(reply.body, type=dict[str, Any])
        body = {"model": model, **{name: answer[name] for name in names}}
    except (*NOT_READ, KeyError):
        raise RouterError(
            "upstream_status",
            f"A worker answered {request.path} without {' and '.join(names)}; does it speak this protocol?",
        ) from None
    return whole(Reply(200, {"content-type": "application/json"}, msgspec.json.encode(body)), request[CALL_ID])
