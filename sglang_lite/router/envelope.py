"""What happens around every handler: ids, keys, cross-origin calls, counts, and one form for all errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from sglang_lite.router.access import CALLER
from sglang_lite.router.bodies import read_body
from sglang_lite.router.call import BEGUN, CALL_ID, REQUEST_ID, request_id_of
from sglang_lite.router.context import CONTEXT, RouterContext
from sglang_lite.router.errors import NO_SUCH_PATH, RouterError, error_body, error_response
from sglang_lite.router.exchange import end_stream
from sglang_lite.router.siblings import is_sibling
from sglang_lite.server.protocol_errors import JsonErrorHandler, JsonErrorRunner, JsonErrorServer

logger = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def envelope(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Serve a request; whatever goes wrong becomes the envelope of ``errors``."""
    context = request.app[CONTEXT]
    context.serving += 1
    try:
        return await _served(request, handler, context)
    finally:
        context.serving -= 1


async def _served(request: web.Request, handler: _Handler, context: RouterContext) -> web.StreamResponse:
    started = time.monotonic()
    request[CALL_ID] = request_id_of(request, context.options.request_id_headers)
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "other"
    response: web.StreamResponse | None = context.cross_origin.preflight(request)
    if response is None:
        try:
            if context.siblings is None or not is_sibling(request):
                request[CALLER] = context.access.check(request.method, route, request.headers)
            if request.can_read_body:
                await read_body(request)
            response = await handler(request)
        except RouterError as error:
            response = await _failed(request, error)
        except web.HTTPException as error:
            response = await _failed(request, from_library(error))
        except ConnectionError:
            raise  # the client is gone: nobody reads an answer
        except Exception:  # a fault of ours: the client gets the envelope, the operator the traceback
            logger.exception("fault while serving %s", request.path)
            response = await _failed(
                request, RouterError("internal_error", "The router failed on this request; its log says more.")
            )
    if context.draining and not response.prepared:
        response.force_close()  # the next request on this connection would find nobody
    context.metrics.requests.labels(route, response.status).inc()
    context.metrics.duration.labels(route).observe(time.monotonic() - started)
    return response


def from_library(error: web.HTTPException) -> RouterError:
    """An error that aiohttp raised, as one of ours."""
    match error.status:
        case 404:
            return RouterError("not_found", NO_SUCH_PATH)
        case 405:
            return RouterError(
                "method_not_allowed",
                f"This path takes the method {error.headers.get('Allow', 'that it is documented with')} only.",
                {"allow": error.headers.get("Allow", "")},
            )
        case status if status >= 500:
            return RouterError("internal_error", error.reason)
        case _:
            return RouterError("bad_request", error.reason)


async def _failed(request: web.Request, error: RouterError) -> web.StreamResponse:
    """The error as an answer, or at the end of the one that has begun."""
    stream = request.get(BEGUN)
    if stream is not None:
        return await end_stream(stream, error)
    response = error_response(error)
    response.headers[REQUEST_ID] = request[CALL_ID]
    return response


class _EnvelopeHandler(JsonErrorHandler):
    """A connection whose errors before any route have the envelope too."""

    __slots__ = ()

    def answer(self, path: str, status: int, message: str) -> web.Response:
        del path
        code = "internal_error" if status >= 500 else "bad_request"
        error = RouterError(code, message)
        return web.Response(body=error_body(error), status=status, content_type="application/json")


class _EnvelopeServer(JsonErrorServer):
    handler_class = _EnvelopeHandler


class EnvelopeRunner(JsonErrorRunner):
    """Runs the application on connections of that kind."""

    server_class = _EnvelopeServer
