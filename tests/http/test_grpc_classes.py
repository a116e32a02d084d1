"""A model with classes over gRPC: the labels of the HTTP route, and no generation."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2 as pb
from tests.support.grpc_server import grpc_server
from tests.support.tiny_classifiers import save_classifier

PROMPTS = [[5, 9, 77, 3], [4, 8]]


async def test_classes_are_those_of_the_http_route(tmp_path: Path) -> None:
    save_classifier(tmp_path, "Qwen3")
    async with grpc_server(tmp_path, page_size=4, max_total_tokens=512) as clients:
        expected = (await clients.http.post("/v1/classify", {"input": PROMPTS})).json()
        inputs = [{"input_ids": prompt} for prompt in PROMPTS]
        reply = await clients.native.Classify(pb.ClassifyRequest(inputs=inputs))
        passed = await clients.native.OpenAIClassify(pb.OpenAIJsonRequest(json=json.dumps({"input": PROMPTS}).encode()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in clients.native.TextGenerate(pb.TextGenerateRequest(text="一")):
                pass
    assert [item.label for item in reply.classifications] == [item["label"] for item in expected["data"]]
    for item, other in zip(reply.classifications, expected["data"], strict=True):
        assert item.score == pytest.approx(max(other["probs"]), abs=1e-5)
    for item, other in zip(json.loads(passed.json)["data"], expected["data"], strict=True):
        assert (item["index"], item["label"]) == (other["index"], other["label"])
        assert item["probs"] == pytest.approx(other["probs"], abs=1e-5)
    assert reply.usage.prompt_tokens == 6
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "/v1/classify" in (caught.value.details() or "")
