"""From prepared requests to the columns of one ingress frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_lite.cache.namespace import join_namespace
from sglang_lite.engine.adapter_registry import LoadedAdapter
from sglang_lite.engine.limits import PreparedPrompt
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.types import EMPTY_EXTRAS, NO_ADAPTER, NO_SEED, RequestColumns, RequestExtras, RequestFlags


@dataclass(slots=True, frozen=True)
class Submission:
    """One request on its way into the core."""

    key: int
    request: GenerateRequest
    prompt: PreparedPrompt
    adapter: LoadedAdapter | None = None
    grammar: str = ""


def build_columns(submissions: Sequence[Submission], default_timeout: float = 0.0) -> RequestColumns:
    """Columns of N requests that are admitted together.

    Args:
        default_timeout: seconds for requests that name none; 0 for no limit.
    """
    requests = [submission.request for submission in submissions]
    sampling = [request.sampling for request in requests]
    prompts = [submission.prompt for submission in submissions]
    extras = {}
    for index, submission in enumerate(submissions):
        extra = _extras(submission.request, submission.adapter, submission.grammar, submission.prompt.num_resumed)
        if extra != EMPTY_EXTRAS:
            extras[index] = extra
    return RequestColumns(
        key=np.array([submission.key for submission in submissions], np.int64),
        num_tokens=np.array([len(prompt.token_ids) for prompt in prompts], np.int32),
        max_new_tokens=np.array([prompt.max_new_tokens for prompt in prompts], np.int32),
        min_new_tokens=np.array([params.min_new_tokens for params in sampling], np.int32),
        temperature=np.array([params.temperature for params in sampling], np.float32),
        top_p=np.array([params.top_p for params in sampling], np.float32),
        top_k=np.array([min(params.top_k, 2**31 - 1) for params in sampling], np.int32),
        min_p=np.array([params.min_p for params in sampling], np.float32),
        frequency_penalty=np.array([params.frequency_penalty for params in sampling], np.float32),
        presence_penalty=np.array([params.presence_penalty for params in sampling], np.float32),
        repetition_penalty=np.array([params.repetition_penalty for params in sampling], np.float32),
        seed=np.array([_seed(params.seed) for params in sampling], np.int64),
        priority=np.array([request.priority for request in requests], np.int64),
        flags=np.array([_flags(request) for request in requests], np.uint32),
        logprob_start=np.array([_logprob_start(request) for request in requests], np.int32),
        top_logprobs=np.array([request.top_logprobs_num for request in requests], np.int32),
        timeout=np.array([_timeout(request, default_timeout) for request in requests], np.float32),
        token_ids=np.concatenate([prompt.token_ids for prompt in prompts]),
        extras=extras,
        embeds={
            index: request.embeds.values[: len(prompt.token_ids)]
            for index, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
            if request.embeds is not None
        },
    )


def _extras(request: GenerateRequest, adapter: LoadedAdapter | None, grammar: str, num_resumed: int) -> RequestExtras:
    return RequestExtras(
        stop_token_ids=() if request.sampling.ignore_eos else request.sampling.stop_token_ids,
        logit_bias=request.sampling.logit_bias or None,
        namespace=_namespace(request, adapter),
        adapter_slot=NO_ADAPTER if adapter is None else adapter.slot,
        grammar=grammar,
        thinking=request.sampling.thinking if grammar else None,
        token_ids_logprob=request.token_ids_logprob if request.return_logprob else (),
        transfer=request.transfer,
        num_resumed=num_resumed,
        tenant=request.tenant,
        tenant_weight=request.tenant_weight,
    )


def _namespace(request: GenerateRequest, adapter: LoadedAdapter | None) -> str:
    name = request.namespace if adapter is None else adapter.namespace + request.namespace
    return name if request.embeds is None else join_namespace(f"embeds-{request.embeds.name}", name)


def _flags(request: GenerateRequest) -> int:
    flags = RequestFlags.NONE
    if request.sampling.ignore_eos:
        flags |= RequestFlags.IGNORE_EOS
    if request.return_logprob:
        flags |= RequestFlags.RETURN_LOGPROB
        if request.return_hidden_states:
            flags |= RequestFlags.HIDDEN_STATES
    return int(flags)


def _seed(seed: int | None) -> int:
    """``NO_SEED`` is taken, so a request that asks for just that value gets its absolute value; any other stays."""
    if seed is None:
        return NO_SEED
    return seed if seed != NO_SEED else -NO_SEED


def _logprob_start(request: GenerateRequest) -> int:
    return request.logprob_start_len if request.return_logprob else -1


def _timeout(request: GenerateRequest, default: float) -> float:
    return default if request.timeout is None else request.timeout
