"""Models with a score head: the scores of texts, and what such a model does not do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from sglang_lite.models.classifier_config import SCORE
from sglang_lite.models.stored_values import checkpoint_stamp, whole_tensor
from sglang_lite.server.context import ServerContext
from sglang_lite.server.served_weights import ServedWeights
from sglang_lite.types import Float32Array, RequestError, StartupError


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """The last matrix of a classification model.

    Attributes:
        weights: whose it is.
        matrix: float32[classes, hidden].
        labels: names of the classes.
    """

    weights: ServedWeights
    matrix: Float32Array
    labels: tuple[str, ...]

    def scores(self, states: Float32Array) -> Float32Array:
        """float32[N, hidden], the states of the last tokens -> float32[N, classes]."""
        return states @ self.matrix.T


def softmax(scores: Float32Array) -> Float32Array:
    """Probabilities of each row."""
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares: Float32Array = powers / powers.sum(axis=1, keepdims=True)
    return shares


async def score_head(context: ServerContext) -> ScoreHead | None:
    """The head of the weights that are served, None for a model without one.

    Raises:
        RequestError: 503, the checkpoint cannot be read, or has changed since it was loaded.
    """
    labels, weights = context.engine.description.labels, context.weights
    if not labels:
        return None
    known = context.score_head
    if known is None or known.weights is not weights:
        known = context.score_head = await asyncio.to_thread(_read_head, context, weights, labels)
    return known


def _read_head(context: ServerContext, weights: ServedWeights, labels: tuple[str, ...]) -> ScoreHead:
    if checkpoint_stamp(weights.path) != weights.stamp:
        raise RequestError(f"the files of {weights.path} have changed since they were loaded", status=503)
    try:
        matrix = whole_tensor(weights.path, context.engine.description, SCORE)
    except (StartupError, OSError) as error:
        raise RequestError(f"{SCORE} of {weights.path} cannot be read: {error}", status=503) from error
    return ScoreHead(weights, matrix, labels)


async def require_head(context: ServerContext) -> ScoreHead:
    """The head of a classification model.

    Raises:
        RequestError: 501, the model has none; 503, see ``score_head``.
    """
    head = await score_head(context)
    if head is None:
        architectures = ", ".join(context.engine.info.architectures)
        raise RequestError(
            f"{context.model_name!r} ({architectures}) generates text and has no classification head; use /v1/score "
            f"for the probabilities of labels as next tokens",
            status=501,
        )
    return head


def refuse_classifier(context: ServerContext) -> None:
    """For whatever needs the probabilities of tokens.

    Raises:
        RequestError: 501, the model scores classes.
    """
    if context.engine.description.labels:
        architectures = ", ".join(context.engine.info.architectures)
        raise RequestError(
            f"{context.model_name!r} ({architectures}) classifies texts and generates none; use /v1/classify, or "
            f"/v1/embeddings for its states",
            status=501,
        )
