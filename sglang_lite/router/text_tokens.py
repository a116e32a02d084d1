"""The token ids of texts and conversations, as the workers' servers make them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_lite.frontend.chat_template import ChatTemplate
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.frontend.tool_choice import read_tool_choice
from sglang_lite.router.body import Head
from sglang_lite.router.kv_index import token_bytes
from sglang_lite.server.chat_prompt import template_variables
from sglang_lite.types import RequestError

_CHAT = "/v1/chat/completions"
_TEXTS = {"/generate": "text", "/v1/completions": "prompt"}
_text = msgspec.json.Decoder(str)


class TextTokens:
    """A tokenizer and chat template like those of the workers. Safe to use in threads.

    Args:
        path: directory of the tokenizer.
        template: chat template instead of the directory's, as ``--chat-template`` of a server.

    Raises:
        StartupError: no tokenizer is there, or the template is none.
    """

    def __init__(self, path: str, template: str | None) -> None:
        self._tokenizer = Tokenizer.load(path)
        self._template = ChatTemplate.for_tokenizer(self._tokenizer, override=template)

    def of(self, route: str, head: Head, body: bytes) -> bytes | None:
        """Token ids of a request, four little-endian bytes each; None where the worker would refuse it, for a batch,
        and on routes whose prompts are made in other ways."""
        try:
            if route == _CHAT:
                text, special = self._rendered(msgspec.json.decode(body)), False
            elif route in _TEXTS:
                text, special = _text.decode(getattr(head, _TEXTS[route])), True
            else:
                return None
            return token_bytes(self._tokenizer.encode(text, add_special_tokens=special))
        except (RequestError, msgspec.DecodeError, UnicodeError, RecursionError):
            return None

    def _rendered(self, body: Mapping[str, Any]) -> str:
        """The text of a conversation as the server renders it."""
        continues = body.get("continue_final_message") is True
        return self._template.render(
            body.get("messages"),
            tools=read_tool_choice(body).shown,
            add_generation_prompt=body.get("add_generation_prompt", not continues) is True,
            continue_final_message=continues,
            variables=template_variables(body),
        )
