"""The aiohttp application: routes and what surrounds them."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Middleware

from sglang_lite.observability.metrics import ServerMetrics
from sglang_lite.server.absent_routes import add_absent_routes
from sglang_lite.server.adapter_routes import add_adapter_routes
from sglang_lite.server.anthropic_routes import add_anthropic_routes
from sglang_lite.server.auth import auth_middleware
from sglang_lite.server.bodies import MAX_BODY_BYTES
from sglang_lite.server.chat_routes import add_chat_routes
from sglang_lite.server.completion_routes import add_completion_routes
from sglang_lite.server.context import CONTEXT, ServerContext
from sglang_lite.server.control_routes import add_control_routes
from sglang_lite.server.cors import add_origin_headers, preflight_middleware
from sglang_lite.server.explain_routes import add_explain_routes
from sglang_lite.server.health_routes import add_health_routes
from sglang_lite.server.info_routes import add_info_routes
from sglang_lite.server.load_routes import add_load_routes
from sglang_lite.server.memory_routes import add_memory_routes
from sglang_lite.server.metrics_routes import add_metrics_routes, engine_collector
from sglang_lite.server.middleware import error_middleware, generation_middleware, metrics_middleware
from sglang_lite.server.native_routes import add_native_routes
from sglang_lite.server.openapi_routes import add_openapi_routes
from sglang_lite.server.parsing_routes import add_parsing_routes
from sglang_lite.server.peers import peers_middleware
from sglang_lite.server.playground_routes import add_playground_routes
from sglang_lite.server.pooling_routes import add_pooling_routes
from sglang_lite.server.profile_routes import add_profile_routes
from sglang_lite.server.protocol_log import shorten_protocol_errors
from sglang_lite.server.responses_routes import add_responses_routes
from sglang_lite.server.score_routes import add_score_routes
from sglang_lite.server.session_routes import add_session_routes
from sglang_lite.server.tenants import Tenants
from sglang_lite.server.tokenize_routes import add_tokenize_routes
from sglang_lite.server.transfer_routes import add_transfer_routes
from sglang_lite.server.vertex_routes import add_vertex_routes
from sglang_lite.server.weight_routes import add_weight_routes


def make_app(context: ServerContext, *, max_body_bytes: int = MAX_BODY_BYTES) -> web.Application:
    """The application of one server.

    Args:
        context: its engine must be started. With ``enable_metrics`` in the configuration, its metrics are made here
            unless they are set.
        max_body_bytes: a longer request body is answered with 413.
    """
    shorten_protocol_errors()
    config = context.config
    middlewares: list[Middleware] = [error_middleware, preflight_middleware]
    if config.enable_metrics and context.metrics is None:
        role = config.disaggregation_mode if config.is_disaggregated else "unified"
        context.metrics = ServerMetrics(context.model_name, role)
    if context.metrics is not None:
        middlewares.insert(0, metrics_middleware(context.metrics.http))
    tenant_keys = Tenants.of(config).keys
    if config.api_key or config.admin_api_key or tenant_keys:
        middlewares.append(auth_middleware(config.api_key, config.admin_api_key, tenant_keys))
    if context.peers is not None:
        middlewares.append(peers_middleware(context.peers))
    middlewares.append(generation_middleware)
    app = web.Application(middlewares=middlewares, client_max_size=max_body_bytes)
    app[CONTEXT] = context
    app.on_response_prepare.append(add_origin_headers)
    add_health_routes(app)
    add_playground_routes(app)
    add_info_routes(app)
    add_load_routes(app)
    add_control_routes(app)
    add_adapter_routes(app)
    add_weight_routes(app)
    add_memory_routes(app)
    add_profile_routes(app)
    add_native_routes(app)
    add_completion_routes(app)
    add_chat_routes(app)
    add_anthropic_routes(app)
    add_responses_routes(app)
    add_pooling_routes(app)
    add_score_routes(app)
    add_tokenize_routes(app)
    add_openapi_routes(app)
    add_parsing_routes(app)
    add_explain_routes(app)
    add_session_routes(app)
    add_vertex_routes(app)
    add_transfer_routes(app)
    add_absent_routes(app)
    if context.metrics is not None:
        collector = engine_collector(context, context.metrics)
        context.metrics.register(collector)
        add_metrics_routes(app, context.metrics, collector)
    return app
