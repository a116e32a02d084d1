"""Embeddings, scores and ranks are numbers of the model: the chain model's are known in closed form."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.support.chain_model import (
    HIDDEN_SIZE,
    OTHER_LOGPROB,
    SECOND_LOGPROB,
    SUCCESSOR_LOGPROB,
    THIRD_LOGPROB,
    build_chain_model,
)
from tests.support.server import LocalServer, local_server


def unit(token: int) -> list[float]:
    """The chain model's state after a token: one axis for each."""
    vector = [0.0] * HIDDEN_SIZE
    vector[token] = 1.0
    return vector


async def embed(server: LocalServer, given: Any, **fields: Any) -> Any:
    reply = await server.post("/v1/embeddings", {"model": "chain", "input": given, **fields})
    assert reply.status == 200, reply.text
    return reply.json()


async def test_c619_embeddings_are_the_last_state(server: LocalServer) -> None:
    body = await embed(server, ["A", "xB", "ABCD" * 20])
    assert (body["object"], body["model"]) == ("list", "chain")
    assert [(item["object"], item["index"]) for item in body["data"]] == [("embedding", i) for i in range(3)]
    for item, token in zip(body["data"], b"ABD", strict=True):
        np.testing.assert_allclose(item["embedding"], unit(token), atol=1e-5)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == 83
    assert body["usage"]["completion_tokens"] == 0


async def test_embeddings_of_ids_and_of_a_cached_prompt(server: LocalServer) -> None:
    for given in ([65, 66], [[65, 66]], "AB", "AB"):
        body = await embed(server, given)
        np.testing.assert_allclose(body["data"][0]["embedding"], unit(66), atol=1e-5)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    await server.idle()


async def test_embeddings_as_base64_and_cut(server: LocalServer) -> None:
    body = await embed(server, "A", encoding_format="base64", dimensions=100)
    vector = np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, unit(65)[:100], atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": []}, "Input cannot be empty"),
        ({}, "input is required"),
        ({"input": 5}, "input"),
        ({"input": [[1, "x"]]}, "input"),
        ({"input": "A", "dimensions": 513}, "dimensions"),
        ({"input": "A", "dimensions": 0}, "dimensions"),
        ({"input": "A", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "A", "model": "other"}, "model"),
        ({"input": [999]}, "input"),
        ({"input": "A" * 1024}, "input"),
    ],
)
async def test_bad_embedding_requests(server: LocalServer, fields: dict[str, Any], named: str) -> None:
    reply = await server.post("/v1/embeddings", fields)
    assert reply.status == 400
    assert named in reply.json()["message"] or named in (reply.json()["param"] or "")


async def test_openai_sdk_embeddings(server: LocalServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        reply = await client.embeddings.create(model="chain", input=["A", "B"])
    np.testing.assert_allclose(reply.data[1].embedding, unit(66), atol=1e-5)


async def test_native_embeddings(server: LocalServer) -> None:
    one = (await server.post("/encode", {"text": "xB", "rid": "mine"})).json()
    several = (await server.post("/encode", {"input_ids": [[65], [120, 66]]})).json()
    np.testing.assert_allclose(one["embedding"], unit(66), atol=1e-5)
    assert (one["meta_info"]["id"], one["meta_info"]["prompt_tokens"]) == ("mine", 2)
    np.testing.assert_allclose([item["embedding"] for item in several], [unit(65), unit(66)], atol=1e-5)


async def test_c619_scores_are_next_token_probabilities(server: LocalServer) -> None:
    body = {"query": "x", "items": ["A", "B"], "label_token_ids": [66, 126, 94, 67], "model": "chain"}
    reply = (await server.post("/v1/score", body)).json()
    expected = [
        [SUCCESSOR_LOGPROB, SECOND_LOGPROB, THIRD_LOGPROB, OTHER_LOGPROB],
        [OTHER_LOGPROB, SECOND_LOGPROB, THIRD_LOGPROB, SUCCESSOR_LOGPROB],
    ]
    np.testing.assert_allclose(reply["scores"], np.exp(expected), atol=1e-4)
    assert (reply["object"], reply["model"], reply["usage"]["prompt_tokens"]) == ("scoring", "chain", 4)


async def test_scores_over_the_labels_alone(server: LocalServer) -> None:
    body = {"query": [65], "items": [[120]], "item_first": True, "label_token_ids": [66, 126], "apply_softmax": True}
    (warm,) = (await server.post("/v1/score", {**body, "temperature": 2.0})).json()["scores"]
    (scores,) = (await server.post("/v1/score", body)).json()["scores"]
    ratio = math.exp(SUCCESSOR_LOGPROB - SECOND_LOGPROB)
    np.testing.assert_allclose(scores, [ratio / (1 + ratio), 1 / (1 + ratio)], atol=1e-4)
    np.testing.assert_allclose(warm[0], math.sqrt(ratio) / (1 + math.sqrt(ratio)), atol=1e-4)


async def test_c619_other_weights_give_other_scores(tmp_path: Path) -> None:
    build_chain_model(tmp_path, overrides={ord("A"): ord("Z")})
    async with local_server(tmp_path, page_size=1, max_total_tokens=2048) as other:
        body = {"query": "", "items": "A", "label_token_ids": [66, 90]}
        (scores,) = (await other.post("/v1/score", body)).json()["scores"]
    np.testing.assert_allclose(scores, np.exp([OTHER_LOGPROB, SUCCESSOR_LOGPROB]), atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [260]}, "label_token_ids"),
        ({"label_token_ids": ["a"]}, "label_token_ids"),
        ({"items": []}, "items"),
        ({"items": [[65]]}, "items"),
        ({"temperature": 2.0}, "temperature"),
        ({"temperature": 0}, "temperature"),
        ({"return_token_logprobs": True}, "return_token_logprobs"),
    ],
)
async def test_bad_scores(server: LocalServer, fields: dict[str, Any], named: str) -> None:
    reply = await server.post("/v1/score", {"query": "x", "items": ["A"], "label_token_ids": [66], **fields})
    assert (reply.status, named in reply.json()["message"].lower()) == (400, True)


async def test_c619_ranks_are_the_probability_of_yes(tmp_path: Path, server: LocalServer) -> None:
    """The chain model answers by the last character of the document: here ``Y`` is followed by yes, ``N`` by no."""
    build_chain_model(tmp_path, overrides={ord("Y"): ord("y"), ord("N"): ord("n")})
    documents = ["it is N", "it is ?", "it is Y", "or ?"]
    body = {"query": "q", "documents": documents, "model": "chain"}
    async with local_server(tmp_path, page_size=1, max_total_tokens=8192) as other:
        ranked = (await other.post("/v1/rerank", body)).json()
        bare = (await other.call("PUT", "/rerank", {**body, "top_n": 1, "return_documents": False})).json()
    assert [item["index"] for item in ranked] == [2, 1, 3, 0]
    assert [item["document"] for item in ranked] == [documents[i] for i in (2, 1, 3, 0)]
    ratio = math.exp(SUCCESSOR_LOGPROB - OTHER_LOGPROB)
    expected = [ratio / (1 + ratio), 0.5, 0.5, 1 / (1 + ratio)]
    np.testing.assert_allclose([item["score"] for item in ranked], expected, atol=1e-4)
    assert [(item["index"], "document" in item) for item in bare] == [(2, False)]
    plain = (await server.post("/v1/rerank", body)).json()
    np.testing.assert_allclose([item["score"] for item in plain], [0.5] * 4, atol=1e-4)
    assert [item["index"] for item in plain] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "fields", [{"documents": []}, {"query": ""}, {"query": None}, {"top_n": 0}, {"documents": "x"}]
)
async def test_bad_ranks(server: LocalServer, fields: dict[str, Any]) -> None:
    reply = await server.post("/v1/rerank", {"query": "q", "documents": ["d"], **fields})
    assert reply.status == 400
    assert next(iter(fields)) in reply.json()["message"]


async def test_classes_need_a_model_with_them(server: LocalServer) -> None:
    reply = await server.post("/v1/classify", {"input": "x"})
    assert reply.status == 501
    assert "classification head" in reply.json()["message"]
    assert (await server.post("/v1/classify", {"input": []})).status == 400
