"""``sglang.runtime.v1.SglangService``: every RPC as the HTTP route of the same purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sglang_lite.rpc import native_info
from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2 as pb
from sglang_lite.rpc.generation import prompt_ids, send
from sglang_lite.rpc.inner import RESUMABLE, Inner, headers_of
from sglang_lite.rpc.native_generation import generate
from sglang_lite.rpc.routed import OFFER, wanted_route
from sglang_lite.rpc.status import Call
from sglang_lite.server.bodies import decode_json
from sglang_lite.server.context import ServerContext
from sglang_lite.server.weight_routes import read_update
from sglang_lite.types import RequestError


def _control(reply: Mapping[str, Any]) -> pb.ControlResponse:
    return pb.ControlResponse(success=bool(reply.get("success", True)), message=str(reply.get("message", "")))


def _numbers(value: Any) -> Iterable[float]:
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    else:
        yield float(value)


def embedding_input(inputs: Sequence[Any]) -> list[Any]:
    """Token ids where the client has sent them, else text.

    Raises:
        RequestError: some have ids and some only text.
    """
    with_ids = sum(1 for item in inputs if item.input_ids)
    if with_ids not in (0, len(inputs)):
        raise RequestError("inputs: either all of them have input_ids, or none", field="inputs")
    return [list(item.input_ids) if with_ids else item.original_text for item in inputs]


class NativeService:
    """The RPCs, by their names; ``rpc.server`` wires them.

    Args:
        context: of the HTTP application.
        inner: its client.
    """

    def __init__(self, context: ServerContext, inner: Inner) -> None:
        self._context = context
        self._inner = inner

    async def _json(self, call: Call, path: str, body: Any = None, method: str = "POST", trace: Any = None) -> Any:
        return (await self._inner.call(method, path, body, headers_of(call, trace))).json()

    async def TextGenerate(self, request: pb.TextGenerateRequest, call: Call) -> None:
        await generate(self._context, request, {"text": request.text}, call)

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> None:
        prompt = {"input_ids": prompt_ids(self._context, request.input_ids, call)}
        await generate(self._context, request, prompt, call)

    async def _embed(self, inputs: list[Any], options: pb.RequestOptions, call: Call) -> pb.EmbedResponse:
        body = {"model": self._context.model_name, "input": inputs, **_options(options)}
        reply = await self._json(call, "/v1/embeddings", body, trace=options.trace_headers)
        vectors = [pb.Embedding(values=item["embedding"], index=item["index"]) for item in reply["data"]]
        return pb.EmbedResponse(embeddings=vectors, usage=_usage(reply["usage"]))

    async def TextEmbed(self, request: pb.TextEmbedRequest, call: Call) -> pb.EmbedResponse:
        return await self._embed(list(request.texts), request.options, call)

    async def Embed(self, request: pb.EmbedRequest, call: Call) -> pb.EmbedResponse:
        return await self._embed(embedding_input(request.inputs), request.options, call)

    async def Classify(self, request: pb.ClassifyRequest, call: Call) -> pb.ClassifyResponse:
        body = {"model": self._context.model_name, "input": embedding_input(request.inputs)}
        reply = await self._json(call, "/v1/classify", body | _options(request.options))
        found = [
            pb.Classification(label=item["label"], score=max(item["probs"]), index=item["index"])
            for item in reply["data"]
        ]
        return pb.ClassifyResponse(classifications=found, usage=_usage(reply["usage"]))

    async def Tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        body = {"prompt": request.text, "add_special_tokens": request.add_special_tokens}
        reply = await self._json(call, "/tokenize", body)
        return pb.TokenizeResponse(token_ids=reply["tokens"], count=reply["count"])

    async def Detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        body = {"tokens": list(request.token_ids), "skip_special_tokens": request.skip_special_tokens}
        return pb.DetokenizeResponse(text=(await self._json(call, "/detokenize", body))["text"])

    async def HealthCheck(self, request: pb.HealthCheckRequest, call: Call) -> pb.HealthCheckResponse:
        healthy, message = await native_info.health(self._context, self._inner)
        return pb.HealthCheckResponse(healthy=healthy, message=message)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, call: Call) -> pb.ModelInfoResponse:
        return await native_info.model_info(self._inner, headers_of(call))

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, call: Call) -> pb.ServerInfoResponse:
        body = await self._json(call, "/server_info", method="GET")
        await call.send_initial_metadata((OFFER,))
        return native_info.server_info(body)

    async def ListModels(self, request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        base = await native_info.model_info(self._inner, headers_of(call))
        cards = (await self._json(call, "/v1/models", method="GET"))["data"]
        return pb.ListModelsResponse(models=[native_info.card(base, item) for item in cards])

    async def GetLoad(self, request: pb.GetLoadRequest, call: Call) -> pb.LoadResponse:
        return native_info.load((await self._json(call, "/v1/loads?include=core", method="GET"))["loads"])

    async def PollTransfers(self, request: pb.PollTransfersRequest, call: Call) -> pb.PollTransfersResponse:
        reply = await self._inner.call("GET", "/poll_transfers", headers=headers_of(call))
        reply.raise_for_status()
        return pb.PollTransfersResponse(**reply.json())

    async def Abort(self, request: pb.AbortRequest, call: Call) -> pb.ControlResponse:
        body: dict[str, Any] = {"abort_all": True} if request.abort_all else {"rid": request.request_id}
        return _control(await self._json(call, "/abort_request", body))

    async def FlushCache(self, request: pb.FlushCacheRequest, call: Call) -> pb.ControlResponse:
        reply = await self._inner.call("POST", "/flush_cache", headers=headers_of(call))
        if reply.status not in (200, 400):
            reply.raise_for_status()
        return pb.ControlResponse(success=reply.status == 200, message=reply.text)

    async def PauseGeneration(self, request: pb.PauseGenerationRequest, call: Call) -> pb.ControlResponse:
        return _control(await self._json(call, "/pause_generation", {}))

    async def ContinueGeneration(self, request: pb.ContinueGenerationRequest, call: Call) -> pb.ControlResponse:
        return _control(await self._json(call, "/continue_generation", {}))

    async def _pass(self, path: str, request: pb.OpenAIJsonRequest, call: Call) -> None:
        await self._send_all(path, _openai_body(request), request, call)

    async def _send_all(
        self, path: str, body: bytes | None, request: pb.OpenAIJsonRequest, call: Call, method: str = "POST"
    ) -> None:
        async def begin(found: Mapping[str, str]) -> None:
            if RESUMABLE in found:
                await call.send_initial_metadata(((RESUMABLE, found[RESUMABLE]),))

        headers = headers_of(call, request.options.trace_headers)
        async for data in self._inner.messages(path, body, headers, method, begin):
            await send(self._context, call, pb.OpenAIJsonResponse(json=data))

    async def _pass_unary(self, path: str, request: pb.OpenAIJsonRequest, call: Call) -> pb.OpenAIJsonResponse:
        headers = headers_of(call, request.options.trace_headers)
        reply = await self._inner.call("POST", path, _openai_body(request), headers)
        reply.raise_for_status()
        return pb.OpenAIJsonResponse(json=reply.body)

    async def ChatComplete(self, request: pb.OpenAIJsonRequest, call: Call) -> None:
        await self._pass("/v1/chat/completions", request, call)

    async def Complete(self, request: pb.OpenAIJsonRequest, call: Call) -> None:
        route = wanted_route(call)
        if route is None:
            await self._pass("/v1/completions", request, call)
            return
        method, path = route
        await self._send_all(path, request.json or None, request, call, method)

    async def Responses(self, request: pb.OpenAIJsonRequest, call: Call) -> None:
        await self._pass("/v1/responses", request, call)

    async def OpenAIEmbed(self, request: pb.OpenAIJsonRequest, call: Call) -> pb.OpenAIJsonResponse:
        return await self._pass_unary("/v1/embeddings", request, call)

    async def OpenAIClassify(self, request: pb.OpenAIJsonRequest, call: Call) -> pb.OpenAIJsonResponse:
        return await self._pass_unary("/v1/classify", request, call)

    async def Score(self, request: pb.OpenAIJsonRequest, call: Call) -> pb.OpenAIJsonResponse:
        return await self._pass_unary("/v1/score", request, call)

    async def Rerank(self, request: pb.OpenAIJsonRequest, call: Call) -> pb.OpenAIJsonResponse:
        return await self._pass_unary("/v1/rerank", request, call)

    async def StartProfile(self, request: pb.StartProfileRequest, call: Call) -> pb.ControlResponse:
        body = {"output_dir": request.output_dir} if request.HasField("output_dir") else {}
        return await self._profile("/start_profile", body, call)

    async def StopProfile(self, request: pb.StopProfileRequest, call: Call) -> pb.ControlResponse:
        return await self._profile("/stop_profile", {}, call)

    async def _profile(self, path: str, body: dict[str, Any], call: Call) -> pb.ControlResponse:
        reply = await self._inner.call("POST", path, body, headers_of(call))
        reply.raise_for_status()
        return pb.ControlResponse(success=True, message=reply.text)

    async def UpdateWeightsFromDisk(self, request: pb.UpdateWeightsFromDiskRequest, call: Call) -> pb.ControlResponse:
        body = {"model_path": request.model_path}
        if request.HasField("load_format"):
            body["load_format"] = request.load_format
        reply = await self._inner.call("POST", "/update_weights_from_disk", body, headers_of(call))
        if reply.status == 400:
            read_update(body)  # raises for bad input; otherwise the engine has refused it
            raise RequestError(msgspec.json.decode(reply.body)["message"], status=412)
        return _control(reply.json())

    async def UpdateWeightVersion(self, request: pb.UpdateWeightVersionRequest, call: Call) -> pb.ControlResponse:
        body: dict[str, Any] = {"new_version": request.new_version}
        if request.HasField("abort_all_requests"):
            body["abort_all_requests"] = request.abort_all_requests
        return _control(await self._json(call, "/update_weight_version", body))

    async def GetWeightsByName(self, request: pb.GetWeightsByNameRequest, call: Call) -> pb.GetWeightsByNameResponse:
        body: dict[str, Any] = {"name": request.name}
        if request.HasField("truncate_size"):
            body["truncate_size"] = request.truncate_size
        values = await self._json(call, "/get_weights_by_name", body)
        return pb.GetWeightsByNameResponse(parameter=_numbers(values))


def _options(options: pb.RequestOptions) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if options.HasField("request_id"):
        body["rid"] = options.request_id
    if options.data_parallel_rank:
        body["routed_dp_rank"] = options.data_parallel_rank
    return body


def _openai_body(request: pb.OpenAIJsonRequest) -> bytes:
    """The JSON of a request; what its options say holds where the JSON says nothing."""
    wanted = _options(request.options)
    if request.options.stream:
        wanted["stream"] = True
    if not wanted:
        return request.json
    body = decode_json(request.json)
    if not isinstance(body, dict):
        return request.json  # the route says what is wrong with it
    return msgspec.json.encode({**wanted, **body})


def _usage(usage: Mapping[str, Any]) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage.get("completion_tokens") or 0,
        total_tokens=usage["total_tokens"],
    )
