"""HTTP bodies of the native routes as messages of ``SglangService``, for workers that offer no JSON for them.

The messages say less than the bodies: a field that they cannot carry is refused by its name, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2 as pb

_SAMPLING = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
_BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_CARRIED = {"text", "input_ids", "sampling_params", "stream", "rid", "routed_dp_rank", "data_parallel_rank", "model"}
_ABSENT: tuple[Any, ...] = (None, False, -1, 0, "", [], {})
"""Values that ask for nothing."""


class NotCarriedError(Exception):
    """The worker's messages have no room for what is asked; the text says for what."""


def generation_request(body: Mapping[str, Any]) -> tuple[str, Any]:
    """RPC and message for a body of ``/generate``.

    Raises:
        NotCarriedError: a field has no place in the message, or a value no type of its.
    """
    extra = [
        name for name, value in body.items() if name not in _CARRIED and name not in _BOOTSTRAP and value not in _ABSENT
    ]
    given = body.get("sampling_params") or {}
    sampling = {name: value for name, value in given.items() if name in _SAMPLING} if isinstance(given, dict) else None
    if sampling is None:
        raise NotCarriedError("sampling_params must be one object")
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    extra += [
        f"sampling_params.{name}" for name, value in given.items() if name not in _SAMPLING and value not in _ABSENT
    ]
    if extra:
        raise NotCarriedError(f"{', '.join(extra)} cannot be sent to this gRPC worker")
    options: dict[str, Any] = {"stream": body.get("stream") is True}
    if body.get("rid") is not None:
        options["request_id"] = body["rid"]
    rank = body.get("routed_dp_rank", body.get("data_parallel_rank"))
    if rank is not None:
        options["data_parallel_rank"] = rank
    fields: dict[str, Any] = {"sampling_params": _without_nulls(sampling), "options": options}
    if body.get("bootstrap_room") is not None:
        fields["disaggregated_params"] = _without_nulls({name: body.get(name) for name in _BOOTSTRAP})
    try:
        if body.get("input_ids") is not None:
            return "Generate", pb.GenerateRequest(input_ids=body["input_ids"], **fields)
        if not isinstance(body.get("text"), str):
            raise NotCarriedError("text must be one string (or input_ids one list of numbers) for this gRPC worker")
        return "TextGenerate", pb.TextGenerateRequest(text=body["text"], **fields)
    except (TypeError, ValueError) as error:
        raise NotCarriedError(f"the body has no form as a message: {error}") from None


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


class Generation:
    """Results of ``/generate`` out of the messages of one call: text and ids are cumulative, as over HTTP.

    Args:
        with_index: there are several choices, and a result says which one it is.
    """

    def __init__(self, with_index: bool) -> None:
        self._with_index = with_index
        self._text: dict[int, str] = {}
        self._ids: dict[int, list[int]] = {}
        self._done: dict[int, dict[str, Any]] = {}

    def take(self, message: pb.GenerateResponse) -> dict[str, Any]:
        """The result of a sequence so far, or an object with the ``error`` that ended the call."""
        kind = message.WhichOneof("body")
        if kind == "error":
            error = {"message": message.error.message, "type": message.error.code, "code": 500, "retryable": False}
            return {"error": error}
        if kind == "complete":
            result = self._result(message, message.complete, message.complete.text, list(message.complete.output_ids))
            result["finish_reason"] = message.complete.finish_reason
            result["meta_info"]["finish_reason"] = _reason(message.complete)
            self._done[message.complete.index] = result
            return result
        chunk = message.chunk
        self._text[chunk.index] = self._text.get(chunk.index, "") + chunk.text
        self._ids.setdefault(chunk.index, []).extend(chunk.token_ids)
        return self._result(message, chunk, self._text[chunk.index], list(self._ids[chunk.index]))

    @property
    def complete(self) -> bool:
        """Whether a sequence has ended."""
        return bool(self._done)

    def whole(self) -> Any:
        """All results: one object, or a list of the choices."""
        results = [self._done[index] for index in sorted(self._done)]
        return results if self._with_index else results[0]

    def _result(self, message: pb.GenerateResponse, part: Any, text: str, ids: list[int]) -> dict[str, Any]:
        meta = {
            "id": message.request_id,
            "finish_reason": None,
            "prompt_tokens": part.prompt_tokens,
            "completion_tokens": part.completion_tokens,
            "cached_tokens": part.cached_tokens,
        }
        result: dict[str, Any] = {"text": text, "output_ids": ids, "meta_info": meta}
        return {**result, "index": part.index} if self._with_index else result


def _reason(complete: pb.GenerateComplete) -> dict[str, Any]:
    kind = complete.finish_reason
    if kind == "length":
        return {"type": kind, "length": complete.completion_tokens}
    return {"type": kind, "matched": None} if kind == "stop" else {"type": kind}


@dataclass(frozen=True, slots=True)
class Typed:
    """A unary RPC with messages of its own: how they are made of a body, and what the body of its answer is."""

    rpc: str
    request: Callable[[dict[str, Any]], Any]
    body: Callable[[Any], Any]


def _plain(kind: Any, **renamed: str) -> Callable[[dict[str, Any]], Any]:
    """Makes a message of a body with the message's fields; ``renamed`` are field -> name in the body."""
    known = {field.name for field in kind.DESCRIPTOR.fields}

    def make(body: dict[str, Any]) -> Any:
        named = {renamed.get(name, name): name for name in known}
        extra = [name for name, value in body.items() if name not in named and name != "model" and value not in _ABSENT]
        if extra:
            raise NotCarriedError(f"{', '.join(extra)} cannot be sent to this gRPC worker")
        try:
            return kind(**{named[name]: value for name, value in body.items() if name in named and value is not None})
        except (TypeError, ValueError) as error:
            raise NotCarriedError(f"the body has no form as a message: {error}") from None

    return make


def _control(reply: pb.ControlResponse) -> dict[str, Any]:
    return {"success": reply.success, "message": reply.message}


def _transfers(reply: pb.PollTransfersResponse) -> dict[str, Any]:
    names = ("completed_descriptor_checksums", "pending_descriptor_checksums")
    counts = {"completed_batches": reply.completed_batches, "pending_batches": reply.pending_batches}
    return {**counts, **{name: list(getattr(reply, name)) for name in names}}


TYPED: dict[str, Typed] = {
    "/abort_request": Typed("Abort", _plain(pb.AbortRequest, request_id="rid"), _control),
    "/flush_cache": Typed("FlushCache", _plain(pb.FlushCacheRequest), _control),
    "/pause_generation": Typed("PauseGeneration", _plain(pb.PauseGenerationRequest), _control),
    "/continue_generation": Typed("ContinueGeneration", _plain(pb.ContinueGenerationRequest), _control),
    "/start_profile": Typed("StartProfile", _plain(pb.StartProfileRequest), _control),
    "/stop_profile": Typed("StopProfile", _plain(pb.StopProfileRequest), _control),
    "/update_weights_from_disk": Typed("UpdateWeightsFromDisk", _plain(pb.UpdateWeightsFromDiskRequest), _control),
    "/update_weight_version": Typed("UpdateWeightVersion", _plain(pb.UpdateWeightVersionRequest), _control),
    "/get_weights_by_name": Typed(
        "GetWeightsByName", _plain(pb.GetWeightsByNameRequest), lambda reply: {"parameter": list(reply.parameter)}
    ),
    "/poll_transfers": Typed("PollTransfers", _plain(pb.PollTransfersRequest), _transfers),
    "/tokenize": Typed(
        "Tokenize",
        _plain(pb.TokenizeRequest, text="prompt"),
        lambda reply: {"tokens": list(reply.token_ids), "count": reply.count},
    ),
    "/detokenize": Typed(
        "Detokenize", _plain(pb.DetokenizeRequest, token_ids="tokens"), lambda reply: {"text": reply.text}
    ),
}
"""Routes of the native runtime with an RPC of their own."""


def server_info(reply: pb.ServerInfoResponse) -> dict[str, Any]:
    """``/server_info`` out of its attributes: what is no plain text there is JSON."""
    return {name: _value(name, text) for name, text in reply.attributes.items()}


_TEXTS = frozenset({"served_model_name", "model_path", "disaggregation_mode", "version"})


def _value(name: str, text: str) -> Any:
    if name in _TEXTS:
        return text
    try:
        return msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return text
