"""The token ids of a request, where they can be known: given ones, or those of a tokenizer like the workers'."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from sglang_lite.router.body import Head
from sglang_lite.router.kv_index import token_bytes
from sglang_lite.router.prompt import Prompt

if TYPE_CHECKING:
    from sglang_lite.router.text_tokens import TextTokens

_ids = msgspec.json.Decoder(list[int])


class PromptTokens:
    """Finds the token ids of requests.

    A request whose cache has a name that hashes do not tell (``extra_key``, an adapter), a batch, and a text without a
    tokenizer have none.

    Args:
        path: directory of the tokenizer, the workers' own; None for none.
        template: chat template instead of the directory's.
    """

    def __init__(self, path: str | None = None, template: str | None = None) -> None:
        self._texts: TextTokens | None = None
        if path is not None:
            # Imported where it is used: it loads much that a router without it has no use for.
            from sglang_lite.router.text_tokens import TextTokens

            self._texts = TextTokens(path, template)

    async def add_to(self, prompt: Prompt, route: str, head: Head, body: bytes) -> Prompt:
        """``prompt`` with its tokens. Texts are tokenized in a thread."""
        named = any(bytes(value) not in (b"", b"null") for value in (head.extra_key, head.lora_path))
        if named or ":" in (head.model_name or ""):
            return prompt
        tokens, is_known = _given(head)
        if not is_known and self._texts is not None:
            tokens = await asyncio.to_thread(self._texts.of, route, head, body)
        return replace(prompt, tokens=tokens, salt=head.cache_salt if isinstance(head.cache_salt, str) else "")


def _given(head: Head) -> tuple[bytes | None, bool]:
    """Tokens that the request brings, and whether it brings any."""
    for raw in (head.input_ids, head.prompt):
        data = bytes(raw)
        if data.startswith(b"["):
            try:
                return token_bytes(_ids.decode(data)), True
            except msgspec.DecodeError:
                return None, True
    return None, False
