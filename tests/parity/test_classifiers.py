"""Models with a score head over HTTP: the scores and probabilities of transformers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from safetensors.torch import load_file, save_file

from sglang_lite import startup
from sglang_lite.config import ServerConfig
from sglang_lite.models.description import read_description
from sglang_lite.models.stored_values import checkpoint_stamp
from sglang_lite.server.app import make_app
from sglang_lite.server.context import Phase, ServerContext
from sglang_lite.types import StartupError
from tests.support.in_process_engine import InProcessEngine
from tests.support.tiny_classifiers import CLASSIFIERS, LABELS, save_classifier

PROMPTS = [[5, 9, 77, 3], [(7 * index) % 120 + 3 for index in range(45)], [4]]


def logits(oracle: Any, prompts: list[list[int]]) -> np.ndarray:
    with torch.no_grad():
        return np.stack([oracle(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts])


@asynccontextmanager
async def serving(directory: Path, **options: Any) -> AsyncIterator[TestClient[Any, Any]]:
    engine = InProcessEngine(
        directory, page_size=4, chunked_prefill_size=16, max_total_tokens=512, max_running_requests=4, **options
    )
    try:
        context = ServerContext(engine)
        context.phase = Phase.READY
        async with TestClient(TestServer(make_app(context))) as client:
            yield client
    finally:
        engine.close()


async def post(client: TestClient[Any, Any], path: str, body: dict[str, Any], status: int = 200) -> Any:
    async with client.post(path, json=body) as response:
        reply = await response.json()
        assert response.status == status, reply
        return reply


@pytest.mark.parametrize("family", list(CLASSIFIERS))
async def test_classes_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    expected = logits(save_classifier(tmp_path, family), PROMPTS)
    shares = torch.softmax(torch.from_numpy(expected), dim=-1).numpy()
    async with serving(tmp_path) as client:
        reply = await post(client, "/v1/classify", {"input": PROMPTS, "model": "default"})
        again = await post(client, "/v1/classify", {"input": PROMPTS[1]})
        native = await post(client, "/classify", {"input_ids": PROMPTS})
        encoded = await post(client, "/encode", {"input_ids": PROMPTS[0]})
    assert reply["object"] == "list" and reply["id"].startswith("classify-") and reply["created"] > 0
    for index, item in enumerate(reply["data"]):
        np.testing.assert_allclose(item["probs"], shares[index], atol=1e-4)
        best = LABELS[int(shares[index].argmax())]
        assert (item["index"], item["label"], item["num_classes"]) == (index, best, 3)
    assert reply["usage"]["prompt_tokens"] == sum(map(len, PROMPTS)) == reply["usage"]["total_tokens"]
    np.testing.assert_allclose(again["data"][0]["probs"], shares[1], atol=1e-4)
    np.testing.assert_allclose([item["embedding"] for item in native], expected, atol=1e-3)
    np.testing.assert_allclose(encoded["embedding"], expected[0], atol=1e-3)


async def test_texts_and_a_checkpoint_in_bfloat16(tmp_path: Path) -> None:
    oracle = save_classifier(tmp_path, "Qwen3", None)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}, path)
    expected = logits(oracle, PROMPTS[:2])
    texts = ["".join(chr(0x4E00 + token) for token in prompt) for prompt in PROMPTS[:2]]
    async with serving(tmp_path) as client:
        reply = await post(client, "/v1/classify", {"input": texts})
        info = await (await client.get("/model_info")).json()
        document = await (await client.get("/openapi.json")).json()
    shares = torch.softmax(torch.from_numpy(expected), dim=-1).numpy()
    np.testing.assert_allclose([item["probs"] for item in reply["data"]], shares, atol=1e-4)
    assert {item["label"] for item in reply["data"]} <= {"LABEL_0", "LABEL_1"}
    assert info["is_generation"] is False and "/v1/classify" in document["paths"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [5]}),
        ("/v1/completions", {"prompt": [5]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"model": "default", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/score", {"query": "x", "items": ["y"], "label_token_ids": [1]}),
    ],
)
async def test_a_classifier_generates_nothing(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    save_classifier(tmp_path, "Qwen3")
    async with serving(tmp_path, chat_template="{{ messages[0]['content'] }}") as client:
        reply = await post(client, path, body, 501)
    assert "/v1/classify" in str(reply)


async def test_a_replaced_checkpoint_brings_its_own_head(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save_classifier(first, "Qwen3")
    oracle = save_classifier(second, "Qwen3")
    for path in second.iterdir():
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            save_file({**tensors, "score.weight": -tensors["score.weight"]}, path)
    engine = InProcessEngine(first, page_size=4, max_total_tokens=512, max_running_requests=4)
    try:
        context = ServerContext(engine)
        context.phase = Phase.READY
        async with TestClient(TestServer(make_app(context))) as client:
            before = await post(client, "/classify", {"input_ids": PROMPTS[0]})
            context.weights = replace(context.weights, path=str(second), stamp=checkpoint_stamp(second))
            after = await post(client, "/classify", {"input_ids": PROMPTS[0]})
            (second / "model.safetensors").write_bytes(b"x")
            context.weights = replace(context.weights, version="other")
            await post(client, "/classify", {"input_ids": PROMPTS[0]}, 503)
    finally:
        engine.close()
    np.testing.assert_allclose(before["embedding"], logits(oracle, PROMPTS[:1])[0], atol=1e-3)
    np.testing.assert_allclose(np.negative(before["embedding"]), after["embedding"], atol=1e-5)


@pytest.mark.parametrize(
    "fields", [{"id2label": {"0": "a", "2": "b"}}, {"id2label": ["a"]}, {"id2label": {}, "num_labels": 10**6}]
)
def test_classes_without_a_name_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    save_classifier(tmp_path, "Qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(StartupError, match=r"id2label|num_labels"):
        read_description(tmp_path)


def test_a_missing_or_wrong_head_ends_the_start(tmp_path: Path) -> None:
    save_classifier(tmp_path, "Qwen3")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "score.weight": tensors["score.weight"][:2].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=r"score\.weight"):
        startup.prepare(ServerConfig(model_path=str(tmp_path), device="cpu"))
