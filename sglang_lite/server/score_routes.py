"""``/v1/score`` and ``/v1/rerank``: the model's probabilities of certain tokens behind a prompt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from sglang_lite.frontend.validation import check_token_ids
from sglang_lite.server import fields
from sglang_lite.server.bodies import read_object
from sglang_lite.server.context import ServerContext, context_of
from sglang_lite.server.definitions.base import parse_body
from sglang_lite.server.definitions.pooling import RerankBody, ScoreBody
from sglang_lite.server.errors import json_response
from sglang_lite.server.identity import Identity
from sglang_lite.server.openai_common import check_model
from sglang_lite.server.pooling import prompt_usage, run_prompts, token_logprobs
from sglang_lite.server.prompts import prompt_fields, read_prompts
from sglang_lite.server.sequences import Prompt
from sglang_lite.types import RequestError

MAX_LABELS = 1024
"""Most tokens scored behind one prompt."""

_INSTRUCTION = "Find the documents that answer the query."
_TASK = "Decide whether the document fits the query under the instruction. Answer with a single word, either yes or no."


def softmax(logprobs: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Probabilities over these tokens alone."""
    highest = max(logprobs)
    weights = [math.exp((logprob - highest) / temperature) for logprob in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]


async def score(request: web.Request) -> web.Response:
    """The probability of each label token behind the query and each item."""
    context, raw = context_of(request), await read_object(request)
    body = parse_body(raw, ScoreBody)
    model = check_model(context, raw)
    labels = body.label_token_ids
    if not 1 <= len(labels) <= MAX_LABELS:
        raise RequestError(
            f"label_token_ids must have 1 to {MAX_LABELS} entries, got {len(labels)}", field="label_token_ids"
        )
    check_token_ids("label_token_ids", labels, context.engine.info.vocab_size)
    for name in ("return_token_logprobs", "score_extraction_token"):
        if raw.get(name):
            raise RequestError(f"{name} is not supported", field=name)
    if body.temperature not in (None, 1.0) and not body.apply_softmax:
        raise RequestError("temperature needs apply_softmax to be true", field="temperature")
    items = read_prompts(body.items, "items")
    outputs = await run_prompts(
        context,
        raw,
        request.headers,
        [_joined(body.query, item, item_first=bool(body.item_first)) for item in items],
        Identity.read(context, raw, request.headers, "score-"),
        prompt_fields=prompt_fields(body.items, len(items), "items"),
        token_ids=labels,
    )
    rows = token_logprobs(outputs)
    if body.apply_softmax:
        scores = [softmax(row, body.temperature or 1.0) for row in rows]
    else:
        scores = [[math.exp(logprob) for logprob in row] for row in rows]
    reply = {"scores": scores, "pooled_hidden_states": None, "token_logprobs": None, "model": model}
    return json_response({**reply, "usage": prompt_usage(outputs), "object": "scoring"})


def _joined(query: str | list[int], item: Prompt, *, item_first: bool) -> Prompt:
    if isinstance(query, str) and isinstance(item, str):
        return item + query if item_first else query + item
    if isinstance(query, str) or isinstance(item, str):
        raise RequestError("query and items must both be texts or both be token ids", field="items")
    return item + query if item_first else query + item


async def rerank(request: web.Request) -> web.Response:
    """Documents by how probable it is that the model calls them relevant, the best first."""
    context, raw = context_of(request), await read_object(request)
    body = parse_body(raw, RerankBody)
    check_model(context, raw)
    if not body.query:
        raise RequestError("query cannot be empty", field="query")
    if not body.documents:
        raise RequestError("documents cannot be empty", field="documents")
    answers = _answer_tokens(context)
    prompts = await asyncio.to_thread(_questions, context, body)
    outputs = await run_prompts(
        context,
        raw,
        request.headers,
        prompts,
        Identity.read(context, raw, request.headers, "rerank-"),
        prompt_fields=[f"documents[{index}]" for index in range(len(prompts))],
        token_ids=answers,
        add_special_tokens=False,
    )
    scores = [softmax(row)[0] for row in token_logprobs(outputs)]
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n]
    return json_response([_ranked(raw, body.documents, index, scores[index]) for index in order])


def _ranked(raw: Mapping[str, Any], documents: Sequence[str], index: int, value: float) -> dict[str, Any]:
    shown = fields.boolean(raw, "return_documents", True)
    document = {"document": documents[index]} if shown else {}
    return {"score": value, **document, "index": index, "meta_info": None}


def _questions(context: ServerContext, body: RerankBody) -> list[Prompt]:
    template = context.chat_template
    if template is None:
        raise RequestError("rerank needs a tokenizer; this server runs with --skip-tokenizer-init", status=501)
    prompts: list[Prompt] = []
    for document in body.documents:
        question = f"Instruction: {body.instruct or _INSTRUCTION}\nQuery: {body.query}\nDocument: {document}"
        prompts.append(
            template.render(
                [{"role": "system", "content": _TASK}, {"role": "user", "content": question}],
                add_generation_prompt=True,
                variables={"enable_thinking": False, "thinking": False},
            )
        )
    return prompts


def _answer_tokens(context: ServerContext) -> tuple[int, int]:
    """The tokens with which the answers yes and no begin.

    Raises:
        RequestError: 501, the vocabulary does not tell them apart.
    """
    tokenizer = context.engine.tokenizer
    if tokenizer is None:
        raise RequestError("rerank needs a tokenizer; this server runs with --skip-tokenizer-init", status=501)
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[:1] for word in ("yes", "no"))
    if not yes or not no or yes == no:
        raise RequestError("the model's vocabulary does not tell yes from no by their first token", status=501)
    return yes[0], no[0]


def add_score_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    app.router.add_post("/v1/score", score)
    for path in ("/v1/rerank", "/rerank"):
        app.router.add_post(path, rerank)
        app.router.add_put(path, rerank)
