"""What ``SglangService`` tells about model, server and load: the HTTP bodies as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2 as pb
from sglang_lite.rpc.inner import Inner
from sglang_lite.server.context import Phase, ServerContext

_MODEL_FIELDS = (
    "model_path",
    "tokenizer_path",
    "is_generation",
    "weight_version",
    "served_model_name",
    "max_context_length",
    "vocab_size",
    "model_type",
    "eos_token_ids",
    "pad_token_id",
    "bos_token_id",
)
_SERVER_FIELDS = (
    "tp_size",
    "dp_size",
    "max_running_requests",
    "max_num_reqs",
    "max_prefill_tokens",
    "max_total_tokens",
)


async def health(context: ServerContext, inner: Inner) -> tuple[bool, str]:
    """Whether ``/health`` is 200, and what the server is doing."""
    healthy = (await inner.call("GET", "/health")).status == 200
    if healthy:
        return True, "ready"
    is_stuck = context.phase is Phase.READY
    return False, (context.engine.failure or "the engine does not answer") if is_stuck else context.phase.value


def _set(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: fields[name] for name in names if fields.get(name) is not None}


async def model_info(inner: Inner, headers: Mapping[str, str]) -> pb.ModelInfoResponse:
    """``/model_info`` and the limits of ``/server_info``.

    Raises:
        RequestError: the key is wrong, or the engine does not answer.
    """
    model = (await inner.call("GET", "/model_info", headers=headers)).json()
    server = (await inner.call("GET", "/server_info", headers=headers)).json()
    preferred = model["preferred_sampling_params"]
    return pb.ModelInfoResponse(
        **_set(model, _MODEL_FIELDS),
        **_set(server, _SERVER_FIELDS),
        preferred_sampling_params_json="" if preferred is None else _text(preferred),
        supports_vision=model["has_image_understanding"],
        max_request_input_length=model["max_req_input_len"],
    )


def card(base: pb.ModelInfoResponse, entry: Mapping[str, Any]) -> pb.ModelInfoResponse:
    """An entry of ``/v1/models``: the model, or an adapter on it."""
    found = pb.ModelInfoResponse()
    found.CopyFrom(base)
    found.served_model_name = entry["id"]
    if entry["parent"] is not None:
        found.model_path = entry["root"]
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def server_info(body: Mapping[str, Any]) -> pb.ServerInfoResponse:
    """``/server_info``: every key is an attribute; texts as they are, the rest as JSON."""
    attributes = {name: _text(value) for name, value in body.items()}
    return pb.ServerInfoResponse(version=body["version"], runtime=body["frontend"], attributes=attributes)


def load(entries: Sequence[Mapping[str, Any]]) -> pb.LoadResponse:
    """The load of all replicas together."""
    return pb.LoadResponse(
        waiting_queue_depth=sum(entry["waiting_queue_depth"] for entry in entries),
        decode_queue_depth=sum(entry["decode_queue_depth"] for entry in entries),
        available_cache_pages=sum(entry["available_cache_pages"] for entry in entries),
    )
