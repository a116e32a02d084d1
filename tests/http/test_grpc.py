"""gRPC: both services over the chain model, beside the HTTP application that they have to agree with."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from sglang_lite.rpc.generated.sglang.grpc.scheduler import sglang_scheduler_pb2 as scheduler_pb
from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2 as pb
from sglang_lite.rpc.generated.smg.grpc.common import common_pb2
from sglang_lite.rpc.open_services import MAX_REFLECTIONS, MAX_WATCHERS
from tests.support.grpc_server import GrpcClients, grpc_server

GREEDY = {"temperature": 0.0}
CHAT = {"model": "chain", "temperature": 0, "max_tokens": 4, "messages": [{"role": "user", "content": "A"}]}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def clients(chain_model: Path) -> AsyncIterator[GrpcClients]:
    async with grpc_server(chain_model, page_size=1, max_total_tokens=65536, enable_metrics=True) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def closed(chain_model: Path) -> AsyncIterator[GrpcClients]:
    """With keys."""
    async with grpc_server(chain_model, max_total_tokens=4096, api_key="user", admin_api_key="admin") as started:
        yield started


async def refused(call: Awaitable[Any] | AsyncIterator[Any]) -> tuple[grpc.StatusCode, str]:
    """Status and message of a call that has to fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return caught.value.code(), caught.value.details() or ""


def text_request(text: str = "A", tokens: int = 4, **options: Any) -> pb.TextGenerateRequest:
    sampling = pb.SamplingParams(max_new_tokens=tokens, **GREEDY)
    return pb.TextGenerateRequest(text=text, sampling_params=sampling, options=pb.RequestOptions(**options))


async def test_c701_unary_generation_is_one_complete_message(clients: GrpcClients) -> None:
    messages = [message async for message in clients.native.TextGenerate(text_request(request_id="c701"))]
    assert len(messages) == 1
    assert messages[0].request_id == "c701"
    complete = messages[0].complete
    assert list(complete.output_ids) == [66, 67, 68, 65]
    assert (complete.text, complete.prompt_tokens, complete.completion_tokens) == ("BCDA", 1, 4)
    assert complete.finish_reason == "length"


async def test_c702_chunks_then_one_complete(clients: GrpcClients) -> None:
    for call in (
        clients.native.TextGenerate(text_request(tokens=40, stream=True)),
        clients.native.Generate(
            pb.GenerateRequest(
                input_ids=[65],
                sampling_params=pb.SamplingParams(max_new_tokens=40, **GREEDY),
                options=pb.RequestOptions(stream=True),
            )
        ),
    ):
        messages = [message async for message in call]
        kinds = [message.WhichOneof("body") for message in messages]
        assert kinds == ["chunk"] * (len(messages) - 1) + ["complete"]
        complete, chunks = messages[-1].complete, [message.chunk for message in messages[:-1]]
        assert [token for chunk in chunks for token in chunk.token_ids] == list(complete.output_ids)
        assert "".join(chunk.text for chunk in chunks) == complete.text == "BCDA" * 10
        assert len({message.request_id for message in messages}) == 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda s: s.Generate(pb.GenerateRequest()), "input_ids"),
        (lambda s: s.TextGenerate(pb.TextGenerateRequest(text="A", sampling_params={"top_p": 0.0})), "top_p"),
        (lambda s: s.TextGenerate(text_request(tokens=10**6)), "context"),
        (lambda s: s.TextGenerate(text_request("A" * 5000)), "context"),
        (lambda s: s.Generate(pb.GenerateRequest(input_ids=[65] * 200_000)), "200000 tokens"),
        (lambda s: s.TextGenerate(pb.TextGenerateRequest(text="A", sampling_params={"best_of": 3})), "best_of"),
        (lambda s: s.TextGenerate(text_request(data_parallel_rank=7)), "out of range"),
        (lambda s: s.ChatComplete(pb.OpenAIJsonRequest(json=b"[1]")), "JSON object"),
        (lambda s: s.Complete(pb.OpenAIJsonRequest(json=b"{")), "not valid JSON"),
        (lambda s: s.Embed(pb.EmbedRequest(inputs=[{"input_ids": [1]}, {"original_text": "A"}])), "input_ids"),
        (lambda s: s.Abort(pb.AbortRequest()), "rid"),
        (lambda s: s.UpdateWeightsFromDisk(pb.UpdateWeightsFromDiskRequest(model_path="/nowhere")), "/nowhere"),
    ],
)
async def test_c703_bad_input(clients: GrpcClients, make: Callable[[Any], Any], said: str) -> None:
    code, message = await refused(make(clients.native))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said in message


async def test_c705_information_equals_http(clients: GrpcClients) -> None:
    native, http = clients.native, clients.http
    tokens = await native.Tokenize(pb.TokenizeRequest(text="ABCD"))
    assert (list(tokens.token_ids), tokens.count) == ([65, 66, 67, 68], 4)
    assert (await native.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))).text == "ABCD"
    health = await native.HealthCheck(pb.HealthCheckRequest())
    assert (health.healthy, health.message) == (True, "ready")
    model, body = await native.GetModelInfo(pb.GetModelInfoRequest()), (await http.get("/model_info")).json()
    for name in ("model_path", "tokenizer_path", "served_model_name", "weight_version", "vocab_size", "model_type"):
        assert getattr(model, name) == body[name]
    assert model.max_request_input_length == body["max_req_input_len"]
    assert list(model.eos_token_ids) == body["eos_token_ids"]
    server, body = await native.GetServerInfo(pb.GetServerInfoRequest()), (await http.get("/server_info")).json()
    assert server.version == body["version"]
    assert server.attributes.keys() == body.keys()
    assert json.loads(server.attributes["kv_cache"]) == body["kv_cache"]
    assert model.max_total_tokens == body["max_total_tokens"]
    models = await native.ListModels(pb.ListModelsRequest())
    assert [card.served_model_name for card in models.models] == ["chain"]
    load = await native.GetLoad(pb.GetLoadRequest())
    expected = (await http.load())["available_cache_pages"]
    assert (load.waiting_queue_depth, load.decode_queue_depth, load.available_cache_pages) == (0, 0, expected)


async def test_c706_what_is_not_there(clients: GrpcClients) -> None:
    unknown = clients.channel.unary_unary("/sglang.runtime.v1.SglangService/WatchEngineState")
    assert (await refused(unknown(b"")))[0] is grpc.StatusCode.UNIMPLEMENTED
    calls = (
        clients.native.PollTransfers(pb.PollTransfersRequest()),
        clients.native.Classify(pb.ClassifyRequest(inputs=[{"original_text": "A"}])),
        clients.native.TextGenerate(
            pb.TextGenerateRequest(text="A", disaggregated_params={"bootstrap_host": "h", "bootstrap_room": 7})
        ),
        clients.scheduler.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()),
    )
    for call in calls:
        assert (await refused(call))[0] is grpc.StatusCode.UNIMPLEMENTED
    assert (await clients.native.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_c708_profile_is_shared_with_the_sidecar(clients: GrpcClients, tmp_path: Path) -> None:
    native, session = clients.native, clients.http.session
    code, _ = await refused(native.StopProfile(pb.StopProfileRequest()))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    async with session.post(f"{clients.sidecar}/start_profile", json={"output_dir": str(tmp_path)}) as reply:
        assert (reply.status, await reply.text()) == (200, "Start profiling.\n")
    code, _ = await refused(native.StartProfile(pb.StartProfileRequest()))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    async with session.post(f"{clients.sidecar}/start_profile") as reply:
        assert reply.status == 409
    stopped = await native.StopProfile(pb.StopProfileRequest())
    assert stopped.success
    assert str(tmp_path) in stopped.message
    async with session.get(f"{clients.sidecar}/metrics") as reply:
        assert reply.status == 200
        assert "sglang:" in await reply.text()
    async with session.get(f"{clients.sidecar}/v1/models") as reply:
        assert reply.status == 404


def _without_times(body: Any) -> Any:
    if isinstance(body, dict):
        return {
            name: _without_times(value) for name, value in body.items() if name not in ("created", "created_at", "id")
        }
    return [_without_times(item) for item in body] if isinstance(body, list) else body


@pytest.mark.parametrize(
    ("rpc", "path", "body"),
    [
        ("ChatComplete", "/v1/chat/completions", CHAT),
        ("Complete", "/v1/completions", {"model": "chain", "prompt": "A", "max_tokens": 4, "temperature": 0}),
        ("OpenAIEmbed", "/v1/embeddings", {"model": "chain", "input": ["A", "BC"]}),
        ("Score", "/v1/score", {"model": "chain", "query": "A", "items": ["B", "C"], "label_token_ids": [65, 66]}),
        ("Rerank", "/v1/rerank", {"model": "chain", "query": "A", "documents": ["B", "C"]}),
    ],
)
async def test_openai_bodies_are_those_of_http(clients: GrpcClients, rpc: str, path: str, body: Any) -> None:
    request = pb.OpenAIJsonRequest(json=json.dumps(body).encode())
    await clients.http.post("/flush_cache")
    call = getattr(clients.native, rpc)(request)
    messages = [item async for item in call] if hasattr(call, "__aiter__") else [await call]
    assert len(messages) == 1
    await clients.http.post("/flush_cache")  # the usage tells what was cached
    expected = await clients.http.post(path, body)
    assert expected.status == 200
    assert _without_times(json.loads(messages[0].json)) == _without_times(expected.json())


@pytest.mark.parametrize(
    ("rpc", "path", "body"),
    [
        ("ChatComplete", "/v1/chat/completions", CHAT),
        ("Responses", "/v1/responses", {"model": "chain", "input": "A", "max_output_tokens": 4, "temperature": 0}),
    ],
)
async def test_openai_streams(clients: GrpcClients, rpc: str, path: str, body: Any) -> None:
    request = pb.OpenAIJsonRequest(json=json.dumps(body).encode(), options=pb.RequestOptions(stream=True))
    events = [json.loads(message.json) async for message in getattr(clients.native, rpc)(request)]
    assert len(events) > 2
    if rpc == "Responses":
        assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    else:
        expected = (await clients.http.post(path, {**body, "stream": True})).events
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        assert text == "".join(e["choices"][0]["delta"].get("content") or "" for e in expected if e != "[DONE]")
        assert text


async def test_routes_without_an_rpc_travel_over_complete(clients: GrpcClients) -> None:
    """Their bodies are those of HTTP; what is no route of this kind is not found, and errors tell the HTTP answer."""
    complete, body = clients.native.Complete, {"prompt": "ABC"}

    def route(text: str, json_: bytes = b"") -> Any:
        return complete(pb.OpenAIJsonRequest(json=json_), metadata=(("x-sgl-route", text),))

    (message,) = [item async for item in route("POST /tokenize", json.dumps(body).encode())]
    assert message.json == (await clients.http.post("/tokenize", body)).body
    (message,) = [item async for item in route("GET /v1/loads?include=core")]
    assert set(json.loads(message.json)["loads"][0]) == set(
        (await clients.http.get("/v1/loads?include=core")).json()["loads"][0]
    )
    for wrong in ("GET /metrics", "DELETE /tokenize", "POST /v1/completions", "tokenize", ""):
        assert (await refused(route(wrong)))[0] is grpc.StatusCode.NOT_FOUND
    call = route("POST /generate", b'{"text": "A", "sampling_params": {"top_p": 7}}')
    await refused(call)
    told = dict(await call.trailing_metadata())
    expected = await clients.http.post("/generate", {"text": "A", "sampling_params": {"top_p": 7}})
    assert (told["x-sgl-status"], told["x-sgl-body-bin"]) == (str(expected.status), expected.body)
    assert told["x-sgl-type"].startswith("application/json")


async def test_cancelled_and_late_calls_free_everything(clients: GrpcClients) -> None:
    free = (await clients.http.idle())["available_cache_pages"]
    call = clients.native.TextGenerate(text_request(tokens=1000, stream=True))
    await call.read()
    call.cancel()
    stuck = clients.native.ChatComplete(
        pb.OpenAIJsonRequest(json=json.dumps({**CHAT, "max_tokens": 1000, "stream": True}).encode())
    )
    await stuck.read()
    stuck.cancel()
    code, _ = await refused(clients.native.TextGenerate(text_request(tokens=1000), timeout=0.05))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    load = await clients.http.idle(1.0)
    assert load["available_cache_pages"] == free
    assert clients.http.engine.num_live == 0


async def test_abort_pause_and_flush(clients: GrpcClients) -> None:
    native = clients.native
    call = native.TextGenerate(text_request(tokens=1000, stream=True, request_id="to-abort"))
    messages = aiter(call)
    await anext(messages)
    flushed = await native.FlushCache(pb.FlushCacheRequest())
    assert not flushed.success
    assert (await native.Abort(pb.AbortRequest(request_id="to-abort"))).success
    last = [message async for message in messages][-1]
    assert last.complete.finish_reason == "abort"
    assert not (await native.Abort(pb.AbortRequest(request_id="to-abort"))).success
    assert (await native.PauseGeneration(pb.PauseGenerationRequest())).success
    code, _ = await refused(native.TextGenerate(text_request()))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert (await native.ContinueGeneration(pb.ContinueGenerationRequest())).success
    assert (await native.FlushCache(pb.FlushCacheRequest())).success


async def test_embeddings_and_weights(clients: GrpcClients, chain_model: Path) -> None:
    by_text = await clients.native.TextEmbed(pb.TextEmbedRequest(texts=["A", "BC"]))
    by_ids = await clients.native.Embed(pb.EmbedRequest(inputs=[{"input_ids": [65]}, {"input_ids": [66, 67]}]))
    expected = (await clients.http.post("/v1/embeddings", {"model": "chain", "input": ["A", "BC"]})).json()
    assert by_text == by_ids
    assert by_text.usage.prompt_tokens == 3
    for vector, item in zip(by_text.embeddings, expected["data"], strict=True):
        assert list(vector.values) == pytest.approx(item["embedding"], abs=1e-6)
    named = await clients.native.UpdateWeightVersion(pb.UpdateWeightVersionRequest(new_version="two"))
    assert named.success
    assert (await clients.native.GetModelInfo(pb.GetModelInfoRequest())).weight_version == "two"
    request = pb.GetWeightsByNameRequest(name="model.norm.weight", truncate_size=3)
    body = (await clients.http.post("/get_weights_by_name", {"name": request.name, "truncate_size": 3})).json()
    assert list((await clients.native.GetWeightsByName(request)).parameter) == pytest.approx(body)
    update = pb.UpdateWeightsFromDiskRequest(model_path=str(chain_model))
    assert (await clients.native.UpdateWeightsFromDisk(update)).success


async def test_keys(closed: GrpcClients) -> None:
    user, admin = (("authorization", "Bearer user"),), (("authorization", "Bearer admin"),)
    native, scheduler = closed.native, closed.scheduler
    closed_calls: tuple[Callable[[Any], Any], ...] = (
        lambda key: native.TextGenerate(text_request(), metadata=key),
        lambda key: native.GetModelInfo(pb.GetModelInfoRequest(), metadata=key),
        lambda key: native.ChatComplete(pb.OpenAIJsonRequest(json=json.dumps(CHAT).encode()), metadata=key),
        lambda key: scheduler.GetTokenizer(common_pb2.GetTokenizerRequest(), metadata=key),
        lambda key: scheduler.ListLoadedLoRAAdapters(scheduler_pb.ListLoadedLoRAAdaptersRequest(), metadata=key),
    )
    for make in closed_calls:
        assert (await refused(make(())))[0] is grpc.StatusCode.UNAUTHENTICATED
        call = make(user)
        assert [item async for item in call] if hasattr(call, "__aiter__") else await call is not None
    assert (await refused(native.FlushCache(pb.FlushCacheRequest(), metadata=user)))[0] is (
        grpc.StatusCode.UNAUTHENTICATED
    )
    assert (await native.FlushCache(pb.FlushCacheRequest(), metadata=admin)).success
    assert (await native.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_health_service_and_reflection(clients: GrpcClients) -> None:
    stub = health_pb2_grpc.HealthStub(clients.channel)
    for name in ("", "sglang.runtime.v1.SglangService", "sglang.grpc.scheduler.SglangScheduler"):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass  # it starts as not serving and is told of the change
        watch.cancel()
    code, _ = await refused(stub.Check(health_pb2.HealthCheckRequest(service="none")))
    assert code is grpc.StatusCode.NOT_FOUND
    call = reflection_pb2_grpc.ServerReflectionStub(clients.channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert {"sglang.runtime.v1.SglangService", "sglang.grpc.scheduler.SglangScheduler"} <= names
    call.cancel()


async def test_strangers_take_few_places(clients: GrpcClients) -> None:
    """Streams that need no key and last as long as a client likes."""
    health = health_pb2_grpc.HealthStub(clients.channel)
    reflection = reflection_pb2_grpc.ServerReflectionStub(clients.channel)

    async def watch() -> Any:
        call = health.Watch(health_pb2.HealthCheckRequest())
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.read()
        return call

    async def reflect() -> Any:
        call = reflection.ServerReflectionInfo()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            await call.read()
        return call

    for make, most in ((watch, MAX_WATCHERS), (reflect, MAX_REFLECTIONS)):
        held = [await make() for _ in range(most)]
        refused_call = await make()
        assert await refused_call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in held:
            call.cancel()
        async with asyncio.timeout(10):
            while (again := await make()).done():
                await asyncio.sleep(0.01)
        again.cancel()


@pytest.mark.parametrize("data", [b"\x0a\x02\xff\xfe", b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f"])
async def test_messages_that_are_none(clients: GrpcClients, data: bytes) -> None:
    """Text that is no UTF-8 among them."""
    service = "/sglang.runtime.v1.SglangService"
    for call in (
        clients.channel.unary_stream(f"{service}/TextGenerate")(data),
        clients.channel.unary_unary(f"{service}/Tokenize")(data),
        clients.channel.unary_stream("/sglang.grpc.scheduler.SglangScheduler/Generate")(data),
    ):
        code, message = await refused(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message.startswith("failed to decode Protobuf message: sglang.")


async def test_metadata_may_be_as_long_as_headers(clients: GrpcClients) -> None:
    metadata = tuple((f"x-note-{number}", "a" * 5000) for number in range(4))
    assert (await clients.native.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata)).model_path


def scheduler_request(tokens: int = 4, **fields: Any) -> scheduler_pb.GenerateRequest:
    sampling = scheduler_pb.SamplingParams(
        temperature=0, top_p=1, top_k=-1, repetition_penalty=1, n=1, max_new_tokens=tokens
    )
    return scheduler_pb.GenerateRequest(
        **{"request_id": "", "tokenized": {"input_ids": [65]}, "sampling_params": sampling, **fields}
    )


async def test_scheduler_generation(clients: GrpcClients) -> None:
    call = clients.scheduler.Generate(scheduler_request(request_id="s1"))
    (whole,) = [message async for message in call]
    assert whole.request_id == "s1"
    assert list(whole.complete.output_ids) == [66, 67, 68, 65]
    assert (whole.complete.finish_reason, whole.complete.prompt_tokens) == ("length", 1)
    request = scheduler_request(8, stream=True, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    messages = [message async for message in clients.scheduler.Generate(request)]
    chunks, complete = [message.chunk for message in messages[:-1]], messages[-1].complete
    assert [token for chunk in chunks for token in chunk.token_ids] == list(complete.output_ids)
    scores = [value for chunk in chunks for value in chunk.output_logprobs.token_logprobs]
    assert scores == list(complete.output_logprobs.token_logprobs)
    assert list(complete.output_logprobs.token_ids) == list(complete.output_ids)
    assert [len(top.values) for top in complete.output_logprobs.top_logprobs] == [2] * 8
    assert list(complete.input_logprobs.token_ids) == [65]
    assert not complete.input_logprobs.token_logprobs[0].HasField("value")
    stopped = scheduler_request(8)
    stopped.sampling_params.stop_token_ids.append(68)
    (end,) = [message async for message in clients.scheduler.Generate(stopped)]
    assert (end.complete.finish_reason, end.complete.matched_token_id) == ("stop", 68)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokenized": {}},
        {"sampling_params": {"top_p": 0.0, "n": 1, "repetition_penalty": 1}},
        {"input_embeds": [1.0]},
        {"custom_logit_processor": "code"},
        {"mm_inputs": {"image_urls": ["x"]}},
    ],
)
async def test_scheduler_refuses(clients: GrpcClients, fields: dict[str, Any]) -> None:
    code, _ = await refused(clients.scheduler.Generate(scheduler_request(**fields)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_scheduler_information(clients: GrpcClients, chain_model: Path) -> None:
    scheduler = clients.scheduler
    assert (await scheduler.HealthCheck(scheduler_pb.HealthCheckRequest())).healthy
    model = await scheduler.GetModelInfo(scheduler_pb.GetModelInfoRequest())
    body = (await clients.http.get("/model_info")).json()
    assert (model.served_model_name, model.vocab_size) == ("chain", body["vocab_size"])
    assert list(model.architectures) == body["architectures"]
    server = await scheduler.GetServerInfo(scheduler_pb.GetServerInfoRequest())
    assert server.max_total_num_tokens == 65536
    assert server.server_args["served_model_name"] == "chain"
    loads = await scheduler.GetLoads(scheduler_pb.GetLoadsRequest())
    assert (loads.dp_rank_count, len(loads.loads)) == (1, 1)
    assert loads.loads[0].max_total_num_tokens == 65536
    assert loads.loads[0].HasField("memory")
    bad = scheduler.GetLoads(scheduler_pb.GetLoadsRequest(include=["nothing"]))
    assert (await refused(bad))[0] is grpc.StatusCode.INVALID_ARGUMENT
    flushed = await scheduler.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.5))
    assert flushed.success
    vector = await scheduler.Embed(scheduler_pb.EmbedRequest(tokenized={"input_ids": [65]}))
    assert vector.embedding_dim == len(vector.embedding) > 0
    assert vector.prompt_tokens == 1
    unknown = await scheduler.Abort(scheduler_pb.AbortRequest(request_id="unknown"))
    assert not unknown.success
    loaded = await scheduler.LoadLoRAAdapter(scheduler_pb.LoadLoRAAdapterRequest(lora_name="a", lora_path="/nowhere"))
    assert (loaded.success, "--enable-lora" in loaded.message) == (False, True)
    listed = await scheduler.ListLoadedLoRAAdapters(scheduler_pb.ListLoadedLoRAAdaptersRequest())
    assert not listed.loaded_adapters


async def test_tokenizer_archive(clients: GrpcClients, chain_model: Path) -> None:
    chunks = [chunk async for chunk in clients.scheduler.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert {chunk.sha256 for chunk in chunks} == {sha256(data).hexdigest()}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json") == (chain_model / "tokenizer.json").read_bytes()


async def test_a_reader_that_stops_holds_nothing_up(clients: GrpcClients) -> None:
    slow = clients.native.TextGenerate(text_request(tokens=1000, stream=True))
    messages = aiter(slow)
    first = await anext(messages)
    others = [clients.native.TextGenerate(text_request(tokens=8)) for _ in range(4)]
    for call in others:
        assert [message.complete.text async for message in call] == ["BCDABCDA"]
    rest = [message async for message in messages]
    assert first.chunk.text + "".join(message.chunk.text for message in rest) == "BCDA" * 250
    assert rest[-1].complete.text == "BCDA" * 250
