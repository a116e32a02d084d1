"""What happens around every handler: errors become replies, calls are counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from sglang_lite.observability.metrics import HttpMetrics
from sglang_lite.server.context import Phase, ServerContext, context_of
from sglang_lite.server.errors import error_response, http_error_body, json_response
from sglang_lite.server.tenants import enter_tenant
from sglang_lite.server.vertex_routes import vertex_path
from sglang_lite.types import RequestError

logger = logging.getLogger(__name__)


_GENERATION_PATHS = frozenset(
    {
        "/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/invocations",
        "/v1/embeddings",
        "/encode",
        "/classify",
        "/v1/classify",
        "/v1/score",
        "/v1/rerank",
        "/rerank",
        "/v1/messages",
        "/v1/responses",
    }
)
_REASONS = {404: "Not Found", 405: "Method Not Allowed", 413: "Request Entity Too Large"}


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn what a handler raises into a reply: bad input into its 4xx, a fault of ours into a 500."""
    try:
        return await handler(request)
    except RequestError as error:
        return error_response(request.path, error)
    except web.HTTPException as error:
        message = _REASONS.get(error.status, error.reason)
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            message = f"{message}: a body may have {request.client_max_size} bytes"
        elif "Allow" in error.headers:
            message = f"{message}: {request.path[:200]} takes {error.headers['Allow'].replace(',', ', ')}"
        body = http_error_body(request.path, message, error.status, str(error.status))
        response = json_response(body, error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except (ConnectionError, asyncio.CancelledError):
        raise  # the client is gone: nobody reads a reply
    except Exception as error:  # one request's fault must not reach the others
        logger.exception("%s %s failed", request.method, request.path)
        message = f"Internal server error: {type(error).__name__}"
        return json_response(http_error_body(request.path, message, 500, "InternalServerError"), 500)


def admit(context: ServerContext, headers: Mapping[str, str]) -> None:
    """Let a generation request in, and note for its task who sent it and to which trace it belongs.

    Raises:
        RequestError: 503, the server does not serve now.
    """
    if not context.engine.is_alive:
        raise RequestError(f"the engine is not running: {context.engine.failure or 'it was stopped'}", status=503)
    if context.phase is not Phase.READY:
        raise RequestError(f"the server is {context.phase.value}", status=503)
    if context.tenants is not None:
        enter_tenant(context.tenants.of_call(headers))
    if context.tracer is not None:
        context.tracer.enter(headers)


@web.middleware
async def generation_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count generation requests, which a shutdown waits for, and refuse them before and after the server's time."""
    path = request.path
    if request.method == "GET" or (path not in _GENERATION_PATHS and path != vertex_path()):
        return await handler(request)
    context = context_of(request)
    admit(context, request.headers)
    with context.generation(context.config.max_concurrent_requests):
        return await handler(request)


def metrics_middleware(metrics: HttpMetrics) -> Middleware:
    """A middleware that counts requests, replies and requests in progress by route."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        # The pattern, not the path: clients must not be able to create series.
        endpoint = resource.canonical if resource is not None else "unmatched"
        status: int | None = None
        routing_key = request.headers.get("x-smg-routing-key")
        metrics.started(endpoint, request.method, routing_key)
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            metrics.ended(endpoint, request.method, status, routing_key)

    return count
