"""What one request may ask for at most: every limit in one table, checked before any work is done.

A limit is far above what a useful request needs and low enough that a request at all limits at once cannot hurt
another one. Limits that follow from the model (context length, vocabulary) or from an option of the server
(``--max-concurrent-requests``, ``--max-queued-requests``) are not here.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Final

from sglang_lite.grammar.limits import MAX_GRAMMAR_CHARACTERS, MAX_SCHEMA_PROPERTIES
from sglang_lite.types import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The table. Over ``body_bytes`` the answer is 413, over ``header_bytes`` 400 and the end of the connection,
    otherwise 400 with the field's name.

    Attributes:
        body_bytes, header_bytes: the body; one header, or the request line.
        body_seconds, header_seconds: how long a client may take to send the body (then 408), and its first header
            (then the connection is closed); idle_seconds: the same between two requests of a connection.
        sequences: prompts times choices; choices: ``n`` and ``best_of``.
        request_id, salt: characters of ``rid``, and of ``cache_salt`` or ``extra_key``.
        messages: of a chat; tools, tool_bytes: tools, and all of them as JSON.
        prompt_characters: of a rendered chat; template_seconds: how long rendering it may take.
        stop_strings, stop_characters: strings and patterns each, and the characters of all strings.
        pattern_bytes, pattern_instructions: of a stop pattern, and of all compiled patterns together.
        stop_token_ids, logit_biases, scored_token_ids: entries of these fields.
        grammar_characters: of a schema, expression or tag; schema_properties: ``properties`` of a whole schema.
        top_logprobs: of ``/generate``; openai_top_logprobs: of the OpenAI routes.
        sessions, session_bytes: open at a time, and what all of them hold; session_seconds: the longest time-out of
            one that nobody uses, and that of a session without a time-out of its own.
        embedding_values: numbers in ``input_embeds``.
    """

    body_bytes: int = 32 * 1024 * 1024
    header_bytes: int = 8190
    body_seconds: float = 60.0
    header_seconds: float = 30.0
    idle_seconds: float = 75.0
    sequences: int = 8192
    choices: int = 256
    request_id: int = 256
    salt: int = 1024
    messages: int = 16384
    tools: int = 1024
    tool_bytes: int = 4 * 1024 * 1024
    prompt_characters: int = 64 * 1024 * 1024
    template_seconds: float = 5.0
    stop_strings: int = 32
    stop_characters: int = 8192
    pattern_bytes: int = 256
    pattern_instructions: int = 1024
    stop_token_ids: int = 4096
    logit_biases: int = 65536
    scored_token_ids: int = 4096
    grammar_characters: int = MAX_GRAMMAR_CHARACTERS
    schema_properties: int = MAX_SCHEMA_PROPERTIES
    top_logprobs: int = 1024
    openai_top_logprobs: int = 128
    sessions: int = 1024
    session_bytes: int = 256 * 1024 * 1024
    session_seconds: float = 3600.0
    embedding_values: int = 4 * 1024 * 1024


LIMITS: Final = RequestLimits()


def check_entries(field: str, value: Sized, limit: int) -> None:
    """Refuse a list or an object that is too long, before its entries are looked at.

    Raises:
        RequestError: names the field, the number and the limit.
    """
    if len(value) > limit:
        raise RequestError(f"{field} has {len(value)} entries, over the limit of {limit}", field=field)
