"""Which RPC of a gRPC worker serves a call that came over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_lite.router.body import NOT_READ
from sglang_lite.router.grpc_answers import Answer, Frames, GrpcBrokenError, answer, json_answer, refusal
from sglang_lite.router.grpc_messages import (
    TYPED,
    Generation,
    NotCarriedError,
    generation_request,
    server_info,
)
from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2 as pb

_STREAMING = {"/v1/chat/completions": "ChatComplete", "/v1/completions": "Complete", "/v1/responses": "Responses"}
_WHOLE = {
    "/v1/embeddings": "OpenAIEmbed",
    "/v1/classify": "OpenAIClassify",
    "/v1/score": "Score",
    "/v1/rerank": "Rerank",
}
_NAMED = frozenset({"/v1/responses", "/v1/messages"})
_HEALTH = frozenset({"/health", "/health_generate", "/ready"})


@dataclass(frozen=True, slots=True)
class Planned:
    """A call of an RPC.

    Attributes:
        whole: the answer that all messages make together; GrpcBrokenError when one is missing.
        frames: makes a new writer of events; for calls that are ``streamed`` to the client.
        is_stream_rpc: the RPC answers with a stream of messages, be it of one.
    """

    path: str
    rpc: str
    request: Any
    whole: Callable[[Sequence[Any]], Answer]
    is_stream_rpc: bool = True
    streamed: bool = False
    frames: Callable[[], Frames] = lambda: Frames(_json, named=False)
    metadata: tuple[tuple[str, str], ...] = ()


class _Streamed(msgspec.Struct):
    stream: Any = None


def _json(message: Any) -> bytes:
    data: bytes = message.json
    return data


def _joined(messages: Sequence[Any]) -> Answer:
    if not messages:
        raise GrpcBrokenError("the call ended without a message")
    return answer(b"".join(map(_json, messages)))


def wants_stream(data: bytes | None) -> bool:
    """Whether a body asks for a stream."""
    try:
        return bool(data) and msgspec.json.decode(data or b"", type=_Streamed).stream is True
    except NOT_READ:
        return False


def plan(method: str, path_and_query: str, data: bytes | None, offers_routes: bool) -> Planned | Answer:
    """The call for a request, or the answer where there is none.

    Args:
        offers_routes: the worker takes any JSON route over ``Complete``.
    """
    path = path_and_query.partition("?")[0]
    if path in _HEALTH:
        return Planned(path, "HealthCheck", pb.HealthCheckRequest(), _health, is_stream_rpc=False)
    if path == "/server_info":
        return Planned(path, "GetServerInfo", pb.GetServerInfoRequest(), _info, is_stream_rpc=False)
    if path in _STREAMING or path in _WHOLE:
        rpc = _STREAMING.get(path) or _WHOLE[path]
        return _passed(path, rpc, data, is_stream_rpc=path in _STREAMING)
    if offers_routes:
        return _passed(path, "Complete", data, metadata=(("x-sgl-route", f"{method} {path_and_query}"),))
    try:
        body = msgspec.json.decode(data, type=dict[str, Any]) if data else {}
        if path == "/generate":
            return _generation(body)
        if path in TYPED:
            typed = TYPED[path]
            return Planned(
                path,
                typed.rpc,
                typed.request(body),
                lambda messages: _controlled(path, typed.body(messages[0])),
                is_stream_rpc=False,
            )
    except NOT_READ:
        return refusal(path, "The body must be a JSON object.", 400)
    except NotCarriedError as error:
        return refusal(path, str(error), 400)
    return refusal(path, f"{path[:100]} has no RPC at this gRPC worker.", 501)


def _passed(path: str, rpc: str, data: bytes | None, **more: Any) -> Planned:
    named = path in _NAMED
    streamed = wants_stream(data) and rpc in _STREAMING.values()
    request = pb.OpenAIJsonRequest(json=data or b"")
    return Planned(path, rpc, request, _joined, streamed=streamed, frames=lambda: Frames(_json, named), **more)


def _generation(body: dict[str, Any]) -> Planned:
    rpc, request = generation_request(body)
    several = request.sampling_params.n > 1
    results = Generation(several)

    def whole(messages: Sequence[Any]) -> Answer:
        for message in messages:
            result = results.take(message)
            if "error" in result:
                return json_answer(result, 500)
        if not results.complete:
            raise GrpcBrokenError("the call ended without a complete message")
        return json_answer(results.whole())

    return Planned(
        "/generate",
        rpc,
        request,
        whole,
        streamed=request.options.stream,
        frames=lambda: Frames(lambda message: msgspec.json.encode(results.take(message)), named=False),
    )


def _health(messages: Sequence[Any]) -> Answer:
    return answer(b"", 200 if messages[0].healthy else 503)


def _info(messages: Sequence[Any]) -> Answer:
    server, *model = messages
    names = {name: getattr(model[0], name) for name in ("served_model_name", "model_path")} if model else {}
    return json_answer({**server_info(server), **names})


def _controlled(path: str, body: dict[str, Any]) -> Answer:
    failed = path == "/flush_cache" and not body["success"]  # requests run: an error over HTTP
    return json_answer(body, 400 if failed else 200)
