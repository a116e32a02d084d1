"""Prompts given as vectors: what of them a plan's chunks compute."""

from __future__ import annotations

from sglang_lite.scheduler.plan import EmbeddedTokens
from sglang_lite.scheduler.state import Chunk


def embedded_tokens(chunks: list[Chunk], num_tokens: int) -> tuple[EmbeddedTokens, ...]:
    """The vectors of the chunks, which are the last tokens of a plan of ``num_tokens``.

    A chunk behind a preemption also computes output, which is tokens as ever.
    """
    found = []
    end = num_tokens
    for chunk in reversed(chunks):
        first = end - (chunk.stop - chunk.start)
        vectors = chunk.request.embeds
        if vectors is not None and chunk.start < len(vectors):
            found.append(EmbeddedTokens(first, vectors[chunk.start : chunk.stop]))
        end = first
    return tuple(found)
