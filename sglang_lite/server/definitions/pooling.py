"""Bodies of the routes that read a model's states and probabilities instead of its text."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sglang_lite.server.definitions.base import RequestBody

Texts = str | list[str | int | list[int]]
"""One text, several, the token ids of one, or of several."""

TopCount = Annotated[int, msgspec.Meta(ge=1)]
Dimensions = Annotated[int, msgspec.Meta(ge=1)]
Temperature = Annotated[float, msgspec.Meta(gt=0)]


class PooledBody(RequestBody, frozen=True, kw_only=True):
    """What these routes have in common."""

    model: str | None = None
    user: str | None = None
    rid: str | None = None
    priority: int | None = None
    lora_path: str | None = None


class EmbeddingBody(PooledBody, frozen=True, kw_only=True):
    """``POST /v1/embeddings``."""

    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None


class RerankBody(PooledBody, frozen=True, kw_only=True):
    """``POST /v1/rerank``."""

    query: str
    documents: list[str]
    instruct: str | None = None
    top_n: TopCount | None = None
    return_documents: bool | None = None


class ScoreBody(PooledBody, frozen=True, kw_only=True):
    """``POST /v1/score``."""

    query: str | list[int]
    items: Texts
    label_token_ids: list[int]
    apply_softmax: bool | None = None
    temperature: Temperature | None = None
    item_first: bool | None = None
    return_token_logprobs: bool | None = None
    score_extraction_token: str | int | None = None


class ClassifyBody(PooledBody, frozen=True, kw_only=True):
    """``POST /v1/classify``."""

    input: Texts


class EncodeBody(PooledBody, frozen=True, kw_only=True):
    """``POST /encode``."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
