"""What completions and chat completions have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_lite.frontend.fields import shorten
from sglang_lite.frontend.request import FinishReason, GenerationOutput
from sglang_lite.server import fields
from sglang_lite.server.adapter_routes import split_model
from sglang_lite.server.context import ServerContext
from sglang_lite.server.explain_routes import wants_explanation
from sglang_lite.types import RequestError


def check_model(context: ServerContext, body: dict[str, Any]) -> str:
    """The served name, when the request asks for it or for nothing in particular; ``base:adapter`` as it came.

    Raises:
        RequestError: another model is asked for.
    """
    name = fields.text(body, "model")
    if name is not None and split_model(context, name)[1] is not None:
        return name
    if name is not None and name not in context.accepted_model_names:
        raise RequestError(
            f"model {shorten(name)!r} is not served here; this server serves {context.model_name!r}", field="model"
        )
    return context.model_name


@dataclass(slots=True, frozen=True)
class StreamOptions:
    """``stream`` and ``stream_options``.

    Attributes:
        include_usage: a last chunk with the usage of the whole request.
        continuous_usage: usage on every chunk.
        explain: say at the end where the time of each choice went; streamed or not.
    """

    stream: bool
    include_usage: bool
    continuous_usage: bool
    explain: bool = False

    @classmethod
    def read(cls, body: dict[str, Any]) -> StreamOptions:
        """Read them from a request body."""
        stream = fields.boolean(body, "stream")
        options = fields.mapping(body, "stream_options")
        if options and not stream:
            raise RequestError("stream_options needs stream to be true", field="stream_options")
        return cls(
            stream,
            include_usage=fields.boolean(options, "include_usage"),
            continuous_usage=fields.boolean(options, "continuous_usage_stats"),
            explain=wants_explanation(body),
        )


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int = 0) -> dict[str, Any]:
    """The usage object; ``completion_tokens`` counts those of the reasoning too."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "reasoning_tokens": reasoning_tokens,
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens} if reasoning_tokens else None,
    }


def total_usage(outputs: Sequence[GenerationOutput | None], choices: int, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Usage of a request: prompts counted once however many choices they have, output tokens over all of them.

    Args:
        outputs: newest snapshot of every sequence, prompt-major; None for one that has not answered.
        choices: sequences of each prompt.
        reasoning_tokens: output tokens of all sequences that are reasoning.
    """
    prompts = [output for output in outputs[::choices] if output is not None]
    return usage(
        sum(output.prompt_tokens for output in prompts),
        sum(output.completion_tokens for output in outputs if output is not None),
        sum(output.cached_tokens for output in prompts),
        reasoning_tokens,
    )


def finish_name(reason: FinishReason | None) -> str | None:
    """OpenAI's ``finish_reason``."""
    return None if reason is None else reason.type


def matched_stop(reason: FinishReason | None) -> int | str | None:
    """What ended the text: a token id or a stop string, None when it was not a stop."""
    return reason.matched if reason is not None and reason.type == "stop" else None


def now() -> int:
    """Unix time in whole seconds, as in ``created``."""
    return int(time.time())
