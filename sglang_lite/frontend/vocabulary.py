"""The vocabulary of a tokenizer as grammars see it."""

from __future__ import annotations

from sglang_lite.frontend.parsing.call_syntax import CALL_MARKERS
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.grammar.base import Vocabulary


def grammar_vocabulary(tokenizer: Tokenizer, size: int, end_ids: tuple[int, ...]) -> Vocabulary:
    """The bytes of every token. Special tokens have none: a grammar is about text, and they leave no text.

    The markers of calls are special tokens to some models; structural tags see those.

    Takes about 0.2 s for 150,000 tokens.

    Args:
        size: width of the model's logits.
        end_ids: tokens that end a text; those without a logit are left out.
    """
    hidden = tokenizer.special_ids.union(end_ids)
    count = min(size, tokenizer.vocab_size)
    tokens = [b"" if token in hidden else tokenizer.token_bytes(token) for token in range(count)]
    ids = ((tokenizer.token_to_id(marker), marker) for marker in CALL_MARKERS)
    markers = {
        token: marker.encode()
        for token, marker in ids
        if token is not None and token < count and token in tokenizer.special_ids and token not in end_ids
    }
    return Vocabulary(tokens, size, tuple(token for token in end_ids if 0 <= token < size), markers)
