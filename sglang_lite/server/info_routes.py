"""What is being served: models, model and server information."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from sglang_lite import __version__
from sglang_lite.configuration.kv_events import KVEventsConfig
from sglang_lite.engine.info import LoadSnapshot
from sglang_lite.server.adapter_routes import adapter_cards
from sglang_lite.server.context import ServerContext, context_of
from sglang_lite.server.errors import json_response


def model_card(context: ServerContext) -> dict[str, Any]:
    """The entry of ``/v1/models``."""
    name = context.model_name
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": name,
        "parent": None,
        "max_model_len": context.engine.info.context_length,
    }


async def list_models(request: web.Request) -> web.Response:
    """The model, and the adapters that are loaded beside it."""
    context = context_of(request)
    card = model_card(context)
    return json_response({"object": "list", "data": [card, *adapter_cards(context, card["created"])]})


async def retrieve_model(request: web.Request) -> web.Response:
    """One model card, or 404 in OpenAI's words."""
    context, name = context_of(request), request.match_info["model"]
    if name in context.accepted_model_names:
        return json_response(model_card(context))
    for card in adapter_cards(context, int(time.time())):
        if name == card["id"]:
            return json_response(card)
    error = {
        "message": f"The model '{name[:200]}' does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return json_response({"error": error}, 404)


def model_info_body(context: ServerContext) -> dict[str, Any]:
    """The body of ``/model_info``."""
    config, info, description = context.config, context.engine.info, context.engine.description
    return {
        "model_path": context.weights.path,
        "served_model_name": context.model_name,
        "tokenizer_path": config.effective_tokenizer_path,
        "is_generation": not description.labels,
        "preferred_sampling_params": config.preferred_sampling_params,
        "weight_version": context.weights.version,
        "load_format": "auto",
        "reasoning_parser": config.reasoning_parser,
        "tool_call_parser": config.tool_call_parser,
        "disaggregation_mode": config.disaggregation_mode,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": info.model_type,
        "architectures": list(info.architectures),
        "max_context_length": info.context_length,
        "vocab_size": info.vocab_size,
        "eos_token_ids": list(info.eos_token_ids),
        "pad_token_id": description.pad_token_id,
        "bos_token_id": description.bos_token_id,
        "max_req_input_len": info.max_req_input_len,
    }


async def model_info(request: web.Request) -> web.Response:
    """What the model is."""
    return json_response(model_info_body(context_of(request)))


def server_info_body(context: ServerContext, loads: Sequence[tuple[int, LoadSnapshot]]) -> dict[str, Any]:
    """The body of ``/server_info``: every resolved option, then what the engine made of them."""
    info, arguments = context.engine.info, context.config.public()
    state = info.recurrent_state
    kv_events = KVEventsConfig.parse(context.config.kv_events_config)
    limits = {
        "model_path": context.weights.path,
        "weight_version": context.weights.version,
        "served_model_name": context.model_name,
        "tokenizer_path": context.config.effective_tokenizer_path,
        "page_size": info.page_size,
        "max_total_tokens": info.max_total_tokens,
        "max_running_requests": info.max_running_requests,
        "max_num_reqs": info.max_running_requests,
        "context_length": info.context_length,
        "dtype": info.dtype,
        "device": info.device,
    }
    if not context.config.is_disaggregated:
        arguments.pop("disaggregation_bootstrap_port", None)
    shared = {
        **arguments,
        **limits,
        "world_size": context.config.tp_size,
        "effective_max_running_requests_per_dp": info.max_running_requests,
        "memory_usage": {
            "weight": info.weight_bytes / 2**30,
            "kvcache": info.num_pages * info.kv_cache.page_size_bytes / 2**30,
            "recurrent_state": state.pool_bytes / 2**30 if state is not None else 0.0,
            "token_capacity": info.max_total_tokens,
        },
    }
    return {
        **arguments,
        **limits,
        "launch_command": context.launch_command,
        "status": "ready",
        "max_total_num_tokens": info.max_total_tokens,
        "max_req_input_len": info.max_req_input_len,
        "startup_time": {**info.startup_seconds, **context.startup_seconds},
        "kv_events": None if kv_events is None else kv_events.describe(info.page_size, context.config.dp_size),
        "kv_cache": msgspec.to_builtins(info.kv_cache),
        "recurrent_state": msgspec.to_builtins(state),
        "internal_states": [
            {**shared, "dp_rank": replica, "last_gen_throughput": load.generation_throughput} for replica, load in loads
        ],
        "version": __version__,
        "frontend": "python",
    }


async def server_info(request: web.Request) -> web.Response:
    """How the server was started and what it can hold."""
    context = context_of(request)
    return json_response(server_info_body(context, await context.engine.replica_loads()))


def add_info_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{model:.+}", retrieve_model)
    for path in ("/model_info", "/get_model_info"):
        app.router.add_get(path, model_info)
    for path in ("/server_info", "/get_server_info"):
        app.router.add_get(path, server_info)
