"""``/v1/embeddings`` and ``/encode``: the last hidden state as a vector; ``/v1/classify``: the class it stands for."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from aiohttp import web

from sglang_lite.frontend.request import GenerationOutput
from sglang_lite.server.bodies import read_object
from sglang_lite.server.classification import ScoreHead, require_head, score_head, softmax
from sglang_lite.server.context import ServerContext, context_of
from sglang_lite.server.definitions.base import parse_body
from sglang_lite.server.definitions.pooling import ClassifyBody, EmbeddingBody, EncodeBody
from sglang_lite.server.errors import json_response
from sglang_lite.server.identity import Identity
from sglang_lite.server.native_parse import read_prompts as read_native_prompts
from sglang_lite.server.openai_common import check_model, now
from sglang_lite.server.pooling import embed, last_states, prompt_usage, run_prompts
from sglang_lite.server.prompts import prompt_fields, read_prompts
from sglang_lite.server.sequences import Prompt
from sglang_lite.types import Float32Array


async def embeddings(request: web.Request) -> web.Response:
    """One vector of length 1 for each input."""
    context, raw = context_of(request), await read_object(request)
    body = parse_body(raw, EmbeddingBody)
    model = check_model(context, raw)
    prompts = read_prompts(body.input, "input")
    vectors, outputs = await embed(
        context,
        raw,
        request.headers,
        prompts,
        Identity.read(context, raw, request.headers, "embd-"),
        prompt_fields=prompt_fields(body.input, len(prompts), "input"),
        dimensions=body.dimensions,
    )
    shown = _base64(vectors) if body.encoding_format == "base64" else vectors.tolist()
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(shown)]
    return json_response({"object": "list", "data": data, "model": model, "usage": prompt_usage(outputs)})


def _base64(vectors: Float32Array) -> Sequence[str]:
    """The rows as little-endian float32."""
    return [base64.b64encode(row.astype(np.dtype("<f4")).tobytes()).decode("ascii") for row in vectors]


async def encode(request: web.Request) -> web.Response:
    """The same vectors in the native form: one object, or a list for several prompts.

    Of a classification model the vectors are the scores of the classes.
    """
    context, raw = context_of(request), await read_object(request)
    parse_body(raw, EncodeBody)
    return await _encode(context, raw, request, await score_head(context))


async def encode_scores(request: web.Request) -> web.Response:
    """The scores of the classes, before they are made probabilities, in the form of ``/encode``.

    Raises:
        RequestError: 501, the model has no classes.
    """
    context, raw = context_of(request), await read_object(request)
    parse_body(raw, EncodeBody)
    return await _encode(context, raw, request, await require_head(context))


async def _encode(
    context: ServerContext, raw: dict[str, Any], request: web.Request, head: ScoreHead | None
) -> web.Response:
    prompts, is_batch = read_native_prompts(context, raw)
    field = "text" if raw.get("text") is not None else "input_ids"
    identity = Identity.read(context, raw, request.headers, "")
    names = [f"{field}[{index}]" if is_batch else field for index in range(len(prompts))]
    if head is None:
        vectors, outputs = await embed(context, raw, request.headers, prompts, identity, prompt_fields=names)
    else:
        vectors, outputs = await _scores(context, raw, request, head, prompts, identity, names)
    results: list[dict[str, Any]] = [
        {
            "embedding": vector,
            "meta_info": {
                "id": output.request_id,
                "prompt_tokens": output.prompt_tokens,
                "cached_tokens": output.cached_tokens,
                "weight_version": context.config.weight_version,
            },
        }
        for vector, output in zip(vectors.tolist(), outputs, strict=True)
    ]
    return json_response(results if is_batch else results[0])


async def _scores(
    context: ServerContext,
    raw: dict[str, Any],
    request: web.Request,
    head: ScoreHead,
    prompts: Sequence[Prompt],
    identity: Identity,
    names: Sequence[str],
) -> tuple[Float32Array, list[GenerationOutput]]:
    """float32[N, classes], and the outputs they came from."""
    outputs = await run_prompts(
        context, raw, request.headers, prompts, identity, prompt_fields=names, hidden_states=True
    )
    return await asyncio.to_thread(lambda: head.scores(last_states(outputs))), outputs


async def classify(request: web.Request) -> web.Response:
    """The most probable class of each input, and the probabilities of all.

    Raises:
        RequestError: 501, the model has no classes.
    """
    context, raw = context_of(request), await read_object(request)
    body = parse_body(raw, ClassifyBody)
    model = check_model(context, raw)
    prompts = read_prompts(body.input, "input")
    head = await require_head(context)
    identity = Identity.read(context, raw, request.headers, "classify-")
    names = prompt_fields(body.input, len(prompts), "input")
    scores, outputs = await _scores(context, raw, request, head, prompts, identity, names)
    shares = softmax(scores)
    data = [
        {"index": index, "label": head.labels[best], "probs": row, "num_classes": len(head.labels)}
        for index, (best, row) in enumerate(zip(shares.argmax(axis=1).tolist(), shares.tolist(), strict=True))
    ]
    return json_response(
        {
            "id": identity.shown,
            "object": "list",
            "created": now(),
            "model": model,
            "data": data,
            "usage": prompt_usage(outputs),
        }
    )


def add_pooling_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    app.router.add_post("/v1/embeddings", embeddings)
    app.router.add_post("/v1/classify", classify)
    app.router.add_post("/encode", encode)
    app.router.add_put("/encode", encode)
    app.router.add_post("/classify", encode_scores)
    app.router.add_put("/classify", encode_scores)
