"""Whether tokens are what a transformers model would have drawn, tolerant of ties that rounding decides."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from tests.support.model_library import full_pass

_TIE = 2e-3
"""Logits this near to each other may change places with the rounding of another batch; their spread is about 1.6."""


def assert_greedy(oracle: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Each token of ``output`` has the highest logit behind the prompt and the tokens before it."""
    if not output:
        return
    logits = full_pass(oracle, [*prompt, *output])[len(prompt) - 1 : -1]
    for place, token in enumerate(output):
        behind = float(logits[place].max() - logits[place, token])
        assert behind <= _TIE, f"token {place} of {list(output)} behind {list(prompt)} has a logit {behind} too low"
