"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_lite.frontend.request import TokenLogprobs
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.server.token_text import token_bytes, token_text


def completion_logprobs(
    positions: Sequence[TokenLogprobs], tokenizer: Tokenizer | None, offsets: Sequence[int], *, with_top: bool
) -> dict[str, Any]:
    """The object of ``/v1/completions``: parallel lists, one entry a token.

    Args:
        offsets: of each token in the whole returned text.
        with_top: whether alternatives were asked for.
    """
    return {
        "text_offset": list(offsets),
        "token_logprobs": [position.logprob for position in positions],
        "tokens": [token_text(tokenizer, position.token_id) for position in positions],
        "top_logprobs": [_top_by_text(position, tokenizer) for position in positions] if with_top else None,
    }


def _top_by_text(position: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, float] | None:
    if not position.top:
        return None
    by_text: dict[str, float] = {}
    for logprob, token_id in position.top:
        by_text.setdefault(token_text(tokenizer, token_id), logprob)
    return by_text


def chat_logprobs(positions: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The object of ``/v1/chat/completions``: one entry a token with its bytes and alternatives."""
    return {
        "content": [
            {
                **_chat_token(position.logprob, position.token_id, tokenizer),
                "top_logprobs": [_chat_token(logprob, token_id, tokenizer) for logprob, token_id in position.top],
            }
            for position in positions
        ]
    }


def _chat_token(logprob: float | None, token_id: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token_id),
        "bytes": list(token_bytes(tokenizer, token_id)),
        "logprob": logprob,
    }
