"""``sglang.grpc.scheduler.SglangScheduler``: what SGLang's gateway calls. It tokenizes and detokenizes itself."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import urlencode

import msgspec
from google.protobuf.json_format import ParseDict

from sglang_lite.rpc.generated.sglang.grpc.scheduler import sglang_scheduler_pb2 as pb
from sglang_lite.rpc.generated.smg.grpc.common import common_pb2 as common
from sglang_lite.rpc.generation import check_key, send
from sglang_lite.rpc.inner import Inner, headers_of
from sglang_lite.rpc.kv_messages import load_message
from sglang_lite.rpc.kv_subscription import KvSubscriptions
from sglang_lite.rpc.native_info import health
from sglang_lite.rpc.scheduler_generation import generate, refuse_media
from sglang_lite.rpc.status import Call
from sglang_lite.rpc.tokenizer_archive import tokenizer_archive
from sglang_lite.server.context import ServerContext
from sglang_lite.types import RequestError

_CHUNK_BYTES = 1024 * 1024
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
    "max_req_input_len",
    "architectures",
)


class SchedulerService:
    """The RPCs, by their names; ``rpc.server`` wires them.

    Args:
        context: of the HTTP application.
        inner: its client.
    """

    def __init__(self, context: ServerContext, inner: Inner) -> None:
        self._context = context
        self._inner = inner
        self._subscriptions = KvSubscriptions(context)
        self._started_at = time.time()

    async def _json(self, call: Call, path: str, body: Any = None, method: str = "POST") -> Any:
        return (await self._inner.call(method, path, body, headers_of(call))).json()

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> None:
        await generate(self._context, request, call)

    async def Embed(self, request: pb.EmbedRequest, call: Call) -> pb.EmbedResponse:
        refuse_media(request.mm_inputs)
        if request.is_cross_encoder or request.token_type_ids or request.texts:
            raise RequestError("cross-encoders are not served; send tokenized.input_ids of one text", status=501)
        body: dict[str, Any] = {"model": self._context.model_name, "input": list(request.tokenized.input_ids)}
        if request.request_id:
            body["rid"] = request.request_id
        if request.data_parallel_rank:
            body["routed_dp_rank"] = request.data_parallel_rank
        reply = await self._json(call, "/v1/embeddings", body)
        vector = reply["data"][0]["embedding"]
        prompt_tokens = reply["usage"]["prompt_tokens"]
        return pb.EmbedResponse(embedding=vector, embedding_dim=len(vector), prompt_tokens=prompt_tokens)

    async def HealthCheck(self, request: pb.HealthCheckRequest, call: Call) -> pb.HealthCheckResponse:
        healthy, message = await health(self._context, self._inner)
        return pb.HealthCheckResponse(healthy=healthy, message=message)

    async def Abort(self, request: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        reply = await self._json(call, "/abort_request", {"rid": request.request_id})
        return pb.AbortResponse(success=reply["success"], message=reply["message"])

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, call: Call) -> pb.GetModelInfoResponse:
        body = await self._json(call, "/model_info", method="GET")
        known = {name: body[name] for name in _MODEL_FIELDS if body.get(name) is not None}
        preferred, defaults = body["preferred_sampling_params"], self._context.chat_defaults
        return pb.GetModelInfoResponse(
            **known,
            supports_vision=body["has_image_understanding"],
            preferred_sampling_params="" if preferred is None else msgspec.json.encode(preferred).decode(),
            default_sampling_params_json=msgspec.json.encode(dict(defaults)).decode() if defaults else "",
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, call: Call) -> pb.GetServerInfoResponse:
        body = await self._json(call, "/server_info", method="GET")
        load = (await self._json(call, "/v1/loads", method="GET"))["loads"]
        reply = pb.GetServerInfoResponse(
            active_requests=sum(entry["num_reqs"] for entry in load),
            is_paused=self._context.paused,
            last_receive_timestamp=max((entry["timestamp"] for entry in load), default=0.0),
            uptime_seconds=time.time() - self._started_at,
            sglang_version=body["version"],
            server_type="grpc",
            max_total_num_tokens=body["max_total_num_tokens"],
        )
        states = body.pop("internal_states")
        reply.start_time.FromNanoseconds(int(self._started_at * 1e9))
        ParseDict(body, reply.server_args)
        ParseDict({"internal_states": states}, reply.scheduler_info)
        return reply

    async def GetLoads(self, request: pb.GetLoadsRequest, call: Call) -> pb.GetLoadsResponse:
        query = {"include": ",".join(request.include)} if request.include else {}
        if request.HasField("dp_rank"):
            query["dp_rank"] = str(request.dp_rank)
        body = await self._json(call, f"/v1/loads?{urlencode(query)}", method="GET")
        loads = [
            ParseDict(entry, pb.SchedulerLoad(), ignore_unknown_fields=True) for entry in map(_entry, body["loads"])
        ]
        return pb.GetLoadsResponse(
            timestamp=body["timestamp"],
            version=body["version"],
            dp_rank_count=self._context.config.dp_size,
            loads=loads,
            aggregate=_aggregate(loads),
        )

    async def FlushCache(self, request: common.FlushCacheRequest, call: Call) -> common.FlushCacheResponse:
        path = f"/flush_cache?timeout={request.timeout_s:g}"
        reply = await self._inner.call("POST", path, headers=headers_of(call))
        if reply.status not in (200, 400) or "error" in reply.text:
            reply.raise_for_status()
        return common.FlushCacheResponse(success=reply.status == 200, message=reply.text)

    async def StartProfile(self, request: common.StartProfileRequest, call: Call) -> common.ProfileResponse:
        body: dict[str, Any] = {field.name: value for field, value in request.ListFields()}
        if request.activities:
            body["activities"] = list(request.activities)
        return await self._profile("/start_profile", body, call)

    async def StopProfile(self, request: common.StopProfileRequest, call: Call) -> common.ProfileResponse:
        return await self._profile("/stop_profile", {}, call)

    async def _profile(self, path: str, body: dict[str, Any], call: Call) -> common.ProfileResponse:
        reply = await self._inner.call("POST", path, body, headers_of(call))
        reply.raise_for_status()
        return common.ProfileResponse(success=True, message=reply.text)

    async def GetTokenizer(self, request: common.GetTokenizerRequest, call: Call) -> None:
        check_key(self._context, headers_of(call), "/model_info")
        path = self._context.config.effective_tokenizer_path
        data, digest = await asyncio.to_thread(tokenizer_archive, path)
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = common.GetTokenizerChunk(data=data[start : start + _CHUNK_BYTES], sha256=digest)
            await send(self._context, call, chunk)

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, call: Call) -> None:
        check_key(self._context, headers_of(call), "/flush_cache")  # events hold the prompts of all clients
        self._subscriptions.config(request.start_sequence_number)
        if request.load_records_before_first_batch:
            for entry in (await self._json(call, "/v1/loads?include=core", method="GET"))["loads"]:
                await send(self._context, call, load_message(entry))
        await self._subscriptions.serve(call, request.start_sequence_number)

    async def LoadLoRAAdapter(self, request: pb.LoadLoRAAdapterRequest, call: Call) -> pb.LoadLoRAAdapterResponse:
        body = {"lora_name": request.lora_name, "lora_path": request.lora_path, "pinned": request.pinned}
        if request.lora_id not in ("", request.lora_name):
            raise RequestError("lora_id: adapters are known by their lora_name here; leave it out", field="lora_id")
        told = await self._change_adapters("/load_lora_adapter", body, call)
        return pb.LoadLoRAAdapterResponse(**told)

    async def UnloadLoRAAdapter(self, request: pb.UnloadLoRAAdapterRequest, call: Call) -> pb.UnloadLoRAAdapterResponse:
        body = {"lora_name": request.lora_name or request.lora_id}
        return pb.UnloadLoRAAdapterResponse(**await self._change_adapters("/unload_lora_adapter", body, call))

    async def _change_adapters(self, path: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        reply = await self._inner.call("POST", path, body, headers_of(call))
        value = msgspec.json.decode(reply.body)
        if "loaded_adapters" not in value:
            reply.raise_for_status()
        loaded = list(value.get("loaded_adapters", ()))
        return {"success": value["success"], "message": value["error_message"], "loaded_lora_ids": loaded}

    async def ListLoadedLoRAAdapters(
        self, request: pb.ListLoadedLoRAAdaptersRequest, call: Call
    ) -> pb.ListLoadedLoRAAdaptersResponse:
        check_key(self._context, headers_of(call), "/v1/models")
        loaded = self._context.engine.adapters.loaded
        return pb.ListLoadedLoRAAdaptersResponse(
            loaded_adapters=[
                pb.LoadedLoRAAdapter(lora_id=name, lora_name=name, lora_path=path) for name, path in loaded.items()
            ]
        )


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of ``/v1/loads`` under the names of ``SchedulerLoad``."""
    return {**entry, "num_total_reqs": entry["num_reqs"]} if "num_reqs" in entry else entry


def _aggregate(loads: list[pb.SchedulerLoad]) -> pb.AggregateMetrics:
    count = max(1, len(loads))
    return pb.AggregateMetrics(
        total_running_reqs=sum(load.num_running_reqs for load in loads),
        total_waiting_reqs=sum(load.num_waiting_reqs for load in loads),
        total_reqs=sum(load.num_total_reqs for load in loads),
        avg_token_usage=sum(load.token_usage for load in loads) / count,
        avg_throughput=sum(load.gen_throughput for load in loads) / count,
        avg_utilization=sum(load.utilization for load in loads) / count,
    )
