"""One request of a client on its way: its body, what was read of it, and the headers that a worker gets."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from aiohttp import web

from sglang_lite.router.access import CALLER, NOBODY
from sglang_lite.router.body import Head, parse_head
from sglang_lite.router.context import CONTEXT, RouterContext
from sglang_lite.router.migration import HEADER as RESUMABLE
from sglang_lite.router.migration import Movement
from sglang_lite.router.prompt import Prompt

REQUEST_ID = "x-request-id"
CALL_ID = web.RequestKey("call_id", str)
"""The id of a call, on its request."""
BEGUN = web.RequestKey("begun", web.StreamResponse)
"""The stream that its client gets, once it has begun, on its request."""
_ROUTING_KEYS = ("x-sgl-route-key", "x-smg-routing-key")
_DROPPED = frozenset(
    {
        "cookie",
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "content-encoding",  # the body is unpacked when it is read
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "accept-encoding",
        "x-sgl-decode-url",
        RESUMABLE,
    }
)
_PREFIXES = {
    "/generate": "gnt-",
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/v1/responses": "resp-",
}
_ID = re.compile(r"[!-~]{1,256}")


@dataclass(slots=True)
class Call:
    """One request of a client on its way."""

    request: web.Request
    context: RouterContext
    body: bytes
    head: Head
    request_id: str
    headers: dict[str, str]
    prompt: Prompt
    movement: Movement | None = None


def request_id_of(request: web.Request, names: tuple[str, ...] = (REQUEST_ID,)) -> str:
    """The caller's id, or a new one with the prefix of the path: for none, and for one that no header can hold."""
    for name in names:
        given = request.headers.get(name, "")
        if _ID.fullmatch(given):
            return given
    return f"{_PREFIXES.get(request.path, 'req-')}{random.getrandbits(96):024x}"


def forwarded_headers(request: web.Request, request_id: str) -> dict[str, str]:
    """Headers that a worker gets."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    listed = {name.strip().lower() for line in request.headers.getall("connection", ()) for name in line.split(",")}
    kept = {name: value for name, value in headers.items() if name not in _DROPPED and name not in listed}
    kept[REQUEST_ID] = request_id
    caller = request.get(CALLER, NOBODY)
    if caller.replaces_key:  # a tenant's or an operator's key is not for workers
        kept.pop("x-api-key", None)
        kept.pop("authorization", None)
        if worker_key := request.app[CONTEXT].access.worker_key:
            kept["authorization"] = f"Bearer {worker_key}"
    kept["content-type"] = headers.get("content-type", "application/json")
    return kept


async def read_call(request: web.Request) -> Call:
    """Read a request of a client.

    Raises:
        RouterError: the body is too large or no JSON object.
    """
    context = request.app[CONTEXT]
    body = await request.read()
    request_id, head = request[CALL_ID], parse_head(body)
    prompt = Prompt(head.key, _routing_key(request))
    if context.kv_events.is_active:
        prompt = await context.prompt_tokens.add_to(prompt, request.path, head, body)
    return Call(request, context, body, head, request_id, forwarded_headers(request, request_id), prompt)


def _routing_key(request: web.Request) -> str | None:
    """The caller's own key for where it wants to be."""
    return next((request.headers[name] for name in _ROUTING_KEYS if request.headers.get(name)), None)
