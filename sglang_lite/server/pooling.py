"""Running prompts for what the model computes at their end: its hidden state, or the probabilities of next tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sglang_lite.frontend.request import GenerationOutput
from sglang_lite.server.context import ServerContext
from sglang_lite.server.generation import collect
from sglang_lite.server.identity import Identity
from sglang_lite.server.openai_common import usage
from sglang_lite.server.sequences import Prompt, build_sequences
from sglang_lite.server.text_length import refuse_endless_texts
from sglang_lite.types import Float32Array, RequestError, SamplingParams

# The step that computes the end of a prompt draws one token behind it; that token is not used.
_ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


async def run_prompts(
    context: ServerContext,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    prompts: Sequence[Prompt],
    identity: Identity,
    *,
    prompt_fields: Sequence[str],
    hidden_states: bool = False,
    token_ids: Sequence[int] = (),
    add_special_tokens: bool = True,
) -> list[GenerationOutput]:
    """Compute every prompt once; outputs in the order of ``prompts``.

    Args:
        hidden_states: whether the state at the end of each prompt is wanted.
        token_ids: tokens whose log-probability behind each prompt is wanted.

    Raises:
        RequestError: a prompt or a field is wrong, or the engine could not compute one.
    """
    if context.config.is_disaggregated:
        raise RequestError(
            f"embeddings and scores are not computed by a server with --disaggregation-mode "
            f"{context.config.disaggregation_mode}; ask one without it"
        )
    sequences = build_sequences(
        context,
        body,
        headers,
        prompts,
        _ONE_TOKEN,
        identity,
        prompt_fields=prompt_fields,
        add_special_tokens=add_special_tokens,
        return_logprob=True,
        is_pooled=hidden_states and not token_ids,
    )
    for sequence in sequences:
        sequence.return_hidden_states = hidden_states
        sequence.token_ids_logprob = tuple(token_ids)
    await refuse_endless_texts(context, sequences)
    outputs = await collect(context, sequences)
    for output in outputs:
        if not output.output_logprobs:
            reason = output.finish_reason
            message = reason.message if reason is not None else None
            raise RequestError(f"the prompt was not computed: {message or 'it was aborted'}", status=503)
    return outputs


def last_states(outputs: Sequence[GenerationOutput]) -> Float32Array:
    """float32[N, H]: the hidden state at the last token of each prompt, after the final norm."""
    return np.stack([output.hidden_states[-1][-1] for output in outputs])


def unit_vectors(states: Float32Array, dimensions: int | None = None) -> Float32Array:
    """The first ``dimensions`` of each row, scaled to length 1; a row of zeros stays one.

    Raises:
        RequestError: more dimensions than the states have.
    """
    width = states.shape[1]
    if dimensions is not None and dimensions > width:
        raise RequestError(f"dimensions must be at most {width}, got {dimensions}", field="dimensions")
    chosen = states[:, :dimensions].astype(np.float64)
    lengths = np.linalg.norm(chosen, axis=1, keepdims=True)
    return (chosen / np.where(lengths == 0, 1, lengths)).astype(np.float32)


async def embed(
    context: ServerContext,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    prompts: Sequence[Prompt],
    identity: Identity,
    *,
    prompt_fields: Sequence[str],
    dimensions: int | None = None,
) -> tuple[Float32Array, list[GenerationOutput]]:
    """Unit vectors float32[N, D] of the prompts' last states, and the outputs they came from."""
    outputs = await run_prompts(
        context, body, headers, prompts, identity, prompt_fields=prompt_fields, hidden_states=True
    )
    vectors = await asyncio.to_thread(lambda: unit_vectors(last_states(outputs), dimensions))
    return vectors, outputs


def token_logprobs(outputs: Sequence[GenerationOutput]) -> list[list[float]]:
    """Log-probabilities of the asked-for tokens behind each prompt."""
    return [[logprob for logprob, _ in output.output_logprobs[0].extra] for output in outputs]


def prompt_usage(outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
    """The usage object of a call that generates no text."""
    return usage(sum(output.prompt_tokens for output in outputs), 0, sum(output.cached_tokens for output in outputs))
