"""``return_hidden_states`` of ``/generate``: what is asked of the engine for it, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_lite.config import ServerConfig
from sglang_lite.engine.result import LOGPROB_FIELDS
from sglang_lite.frontend.fields import describe
from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.types import RequestError

FIELD = "return_hidden_states"


@dataclass(slots=True, frozen=True)
class HiddenStates:
    """What one request wants to see.

    The engine hands out the state behind every scored position, so the prompt is scored too; ``starts`` says which of
    those scores the client asked for.

    Attributes:
        last_only: the state that the last token was drawn from alone.
        starts: for each sequence the first prompt position whose log-probability is shown, -1 for output only, None
            for no log-probabilities at all.
    """

    last_only: bool
    starts: Sequence[int | None]

    def put_into(self, meta: dict[str, Any], index: int, output: GenerationOutput) -> None:
        """Add the states of sequence ``index`` to its ``meta_info``, and take out the scores that nobody asked for."""
        start = self.starts[index]
        if start is None:
            for name in LOGPROB_FIELDS:
                meta.pop(name, None)
        else:
            shown = output.prompt_tokens if start < 0 else start
            for name in LOGPROB_FIELDS:
                if name.startswith("input_") and name in meta:
                    del meta[name][:shown]
        if output.finish_reason is None:
            return
        states = np.concatenate(output.hidden_states) if output.hidden_states else np.empty((0, 0), np.float32)
        prompt = output.prompt_tokens
        if self.last_only:
            meta["hidden_states"] = [row.tolist() for row in states[-1:]]
        else:
            meta["hidden_states"] = [states[:prompt].tolist(), *(row.tolist() for row in states[prompt:])]


def read_hidden_states(
    body: Mapping[str, Any], config: ServerConfig, requests: Sequence[GenerateRequest]
) -> HiddenStates | None:
    """What the body asks for; the requests are changed so that the engine returns it.

    Raises:
        RequestError: a wrong value, or the server does not return hidden states.
    """
    value = body.get(FIELD)
    if value is None or value is False:
        return None
    if value is not True and value != "last":
        raise RequestError(f'{FIELD} must be a boolean or "last", got {describe(value)}', field=FIELD)
    if not config.enable_return_hidden_states:
        raise RequestError(f"{FIELD} needs a server started with --enable-return-hidden-states", field=FIELD)
    starts = [request.logprob_start_len if request.return_logprob else None for request in requests]
    for request in requests:
        request.return_logprob = request.return_hidden_states = True
        request.logprob_start_len = 0
    return HiddenStates(value == "last", starts)
