"""``/v1/embeddings`` and ``/encode``: the last hidden state as a vector; ``/v1/classify`` says what the model lacks."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from aiohttp import web

from sglang_lite.server.bodies import read_object
from sglang_lite.server.context import context_of
from sglang_lite.server.definitions.base import parse_body
from sglang_lite.server.definitions.pooling import ClassifyBody, EmbeddingBody, EncodeBody
from sglang_lite.server.errors import json_response
from sglang_lite.server.identity import Identity
from sglang_lite.server.native_parse import read_prompts as read_native_prompts
from sglang_lite.server.openai_common import check_model
from sglang_lite.server.pooling import embed, prompt_usage
from sglang_lite.server.prompts import prompt_fields, read_prompts
from sglang_lite.types import Float32Array, RequestError


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
    """The same vectors in the native form: one object, or a list for several prompts."""
    context, raw = context_of(request), await read_object(request)
    parse_body(raw, EncodeBody)
    prompts, is_batch = read_native_prompts(context, raw)
    field = "text" if raw.get("text") is not None else "input_ids"
    identity = Identity.read(context, raw, request.headers, "")
    vectors, outputs = await embed(
        context,
        raw,
        request.headers,
        prompts,
        identity,
        prompt_fields=[f"{field}[{index}]" if is_batch else field for index in range(len(prompts))],
    )
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


async def classify(request: web.Request) -> web.Response:
    """Say that the loaded model has no classes.

    Raises:
        RequestError: always: 400 for a body of the wrong shape, 501 for a proper one.
    """
    context, raw = context_of(request), await read_object(request)
    body = parse_body(raw, ClassifyBody)
    check_model(context, raw)
    read_prompts(body.input, "input")
    architectures = ", ".join(context.engine.info.architectures)
    raise RequestError(
        f"{context.model_name!r} ({architectures}) generates text and has no classification head; use /v1/score for "
        f"the probabilities of labels as next tokens",
        status=501,
    )


def add_pooling_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    app.router.add_post("/v1/embeddings", embeddings)
    app.router.add_post("/v1/classify", classify)
    app.router.add_post("/encode", encode)
    app.router.add_put("/encode", encode)
