"""From prompts and parameters of a request body to the sequences that the engine runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sglang_lite.cache.namespace import join_namespace
from sglang_lite.frontend.fields import read_str
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.server import fields
from sglang_lite.server.adapter_routes import adapter_names
from sglang_lite.server.classification import refuse_classifier
from sglang_lite.server.context import ServerContext
from sglang_lite.server.identity import Identity
from sglang_lite.server.session_turns import read_session_id, refuse_session
from sglang_lite.server.transfer_fields import add_transfers
from sglang_lite.server.unsupported import refuse_unsupported, wanted_replica
from sglang_lite.types import RequestError, SamplingParams

_INT64 = 2**63

MAX_SEQUENCES = LIMITS.sequences
"""Most sequences (prompts times choices) of one request: each costs some kilobytes before it runs."""

MAX_SALT_LENGTH = LIMITS.salt
"""Characters of a salt: it is kept for as long as a page is cached under it."""

Prompt = str | list[int]


def check_count(prompts: int, choices: int, field: str) -> int:
    """Sequences of a request.

    Raises:
        RequestError: more than one request may have.
    """
    if prompts * choices > MAX_SEQUENCES:
        raise RequestError(
            f"{field}: {prompts} prompts with {choices} choices each are more than the {MAX_SEQUENCES} sequences that "
            f"one request may have; send several requests",
            field=field,
        )
    return prompts * choices


def namespace_of(body: Mapping[str, Any], index: int = 0, count: int = 1) -> str:
    """The prefix-cache name space that ``cache_salt`` and ``extra_key`` ask for; either may be a list by prompt.

    Raises:
        RequestError: not text, too long, or a list of another length than ``count``, the number of prompts.
    """
    parts = []
    for name in ("cache_salt", "extra_key"):
        value = body.get(name)
        if isinstance(value, list):
            if len(value) != count:
                raise RequestError(f"{name} has {len(value)} entries for {count} prompts", field=name)
            value = value[index]
        text = "" if value is None else read_str(name, value)
        if len(text) > MAX_SALT_LENGTH:
            raise RequestError(f"{name} has {len(text)} characters, over the limit of {MAX_SALT_LENGTH}", field=name)
        parts.append(text)
    return join_namespace(parts[0], parts[1])


def read_priority(body: Mapping[str, Any]) -> int:
    """The field ``priority``, 0 when absent."""
    priority = fields.integer(body, "priority", minimum=-_INT64, maximum=_INT64 - 1)
    return 0 if priority is None else priority


def choice_sampling(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Parameters of one of several choices: with a seed, each choice draws its own reproducible sequence."""
    if choice == 0 or sampling.seed is None:
        return sampling
    # Seeds are 63-bit: stay inside.
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) % _INT64)


def _refuse(context: ServerContext, body: Mapping[str, Any], *, takes_session: bool, is_pooled: bool) -> None:
    """Refuse what the server, its model or the route cannot do."""
    if not is_pooled:
        refuse_classifier(context)
    refuse_unsupported(body, context.config)
    if not takes_session:
        refuse_session(body)


def build_sequences(
    context: ServerContext,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    identity: Identity,
    *,
    prompt_fields: Sequence[str],
    stream: bool = False,
    add_special_tokens: bool = True,
    return_logprob: bool = False,
    logprob_start_len: int = -1,
    top_logprobs_num: int = 0,
    takes_session: bool = False,
    is_pooled: bool = False,
) -> list[GenerateRequest]:
    """The sequences of an OpenAI request, prompt-major.

    Args:
        sampling: parameters of every sequence; ``n`` says how many each prompt has.
        prompt_fields: name of the field that each prompt came from, for error messages.
        takes_session: the caller puts the sequences into the session that the body names.
        is_pooled: only the states of the prompts are wanted, which classification models have too.

    Raises:
        RequestError: a parameter is wrong, or asks for something that is not supported.
    """
    _refuse(context, body, takes_session=takes_session, is_pooled=is_pooled)
    affinity = read_session_id(body)
    replica = wanted_replica(body, headers.get("X-Data-Parallel-Rank"), context.config.dp_size)
    choices = sampling.n
    priority = read_priority(body)
    adapters = adapter_names(context, body, len(prompts))
    count = check_count(len(prompts), choices, "prompt")
    sequences = []
    for index in range(count):
        prompt = prompts[index // choices]
        sequences.append(
            GenerateRequest(
                request_id=identity.base if count == 1 else f"{identity.base}_{index}",
                text=prompt if isinstance(prompt, str) else None,
                input_ids=None if isinstance(prompt, str) else prompt,
                prompt_field=prompt_fields[index // choices],
                sampling=choice_sampling(sampling, index % choices),
                add_special_tokens=add_special_tokens,
                stream=stream,
                return_logprob=return_logprob,
                logprob_start_len=logprob_start_len,
                top_logprobs_num=top_logprobs_num,
                priority=priority,
                namespace=namespace_of(body, index // choices, len(prompts)),
                adapter=adapters[index // choices],
                replica=replica,
                affinity=affinity,
            )
        )
    add_transfers(sequences, body, context.config, choices)
    return sequences
