"""Reading the body of ``/generate``: prompts, per-item parameters, ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from sglang_lite.frontend.fields import wrong_type
from sglang_lite.frontend.parsing.reasoning import REASONING_FORMATS
from sglang_lite.frontend.request import GenerateRequest, PromptVectors
from sglang_lite.frontend.request_ids import parse_request_id
from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.frontend.validation import parse_sampling_params, parse_token_ids, parse_token_ids_logprob
from sglang_lite.server import fields
from sglang_lite.server.adapter_routes import adapter_names
from sglang_lite.server.chat_answer import reasoning_parser_name, thinking_tokens
from sglang_lite.server.classification import refuse_classifier
from sglang_lite.server.context import ServerContext
from sglang_lite.server.hidden_states import HiddenStates, read_hidden_states
from sglang_lite.server.identity import ID_FIELDS
from sglang_lite.server.prompt_embeddings import check_embedded, read_embeddings
from sglang_lite.server.sequences import Prompt, check_count, choice_sampling, namespace_of, read_priority
from sglang_lite.server.session_turns import read_session_id, read_session_params
from sglang_lite.server.transfer_fields import add_transfers
from sglang_lite.server.unsupported import refuse_unsupported, wanted_replica
from sglang_lite.types import Float32Array, RequestError, SamplingParams

_NO_PROMPT = "Either text, input_ids or input_embeds should be provided."
_SCALAR_LOGPROB_FIELDS = ("return_logprob", "logprob_start_len", "top_logprobs_num")


@dataclass(slots=True, frozen=True)
class NativeCall:
    """The sequences of one ``/generate`` request.

    Attributes:
        requests: prompt-major.
        choices: sequences of each prompt.
        is_batch: the reply is a list.
        hidden: how hidden states are shown, None when they are not wanted.
    """

    requests: list[GenerateRequest]
    choices: int
    stream: bool
    is_batch: bool
    text_in_logprobs: bool
    return_prompt_token_ids: bool
    hidden: HiddenStates | None


@dataclass(slots=True, frozen=True)
class _Batch:
    """A body together with how many prompts it has, so that per-prompt fields can be read from it."""

    body: Mapping[str, Any]
    count: int
    is_batch: bool

    def column(self, name: str) -> list[Any]:
        """A field that may be one value for all prompts or, in a batch, a list with one for each."""
        value = self.body.get(name)
        if not isinstance(value, list):
            return [value] * self.count
        if not self.is_batch:
            wrong_type(name, value, "a single value, because there is one prompt")
        self.check_length(name, value)
        return value

    def check_length(self, name: str, value: list[Any]) -> None:
        """Raises RequestError when a per-prompt list has another length than the batch."""
        if len(value) != self.count:
            raise RequestError(f"{name} has {len(value)} entries for {self.count} prompts", field=name)

    def rows(self, names: tuple[str, ...]) -> list[dict[str, Any]]:
        """One small object a prompt with its values of ``names``."""
        columns = {name: self.column(name) for name in names}
        return [{name: column[index] for name, column in columns.items()} for index in range(self.count)]


def _read_any_prompts(context: ServerContext, body: Mapping[str, Any]) -> tuple[Sequence[Prompt | Float32Array], bool]:
    """As ``read_prompts``; ``input_embeds`` are taken too."""
    if body.get("input_embeds") is None:
        return read_prompts(context, body)
    other = next((name for name in ("text", "input_ids") if body.get(name) is not None), None)
    if other is not None:
        raise RequestError(f"{other} and input_embeds are both set; send exactly one of them", field=other)
    check_embedded(body)
    return read_embeddings(context, body)


def read_prompts(context: ServerContext, body: Mapping[str, Any]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a list.

    Raises:
        RequestError: none, two sources, an empty one, or a wrong type.
    """
    text, ids = body.get("text"), body.get("input_ids")
    if text is not None and ids is not None:
        raise RequestError("text and input_ids are both set; send exactly one of them", field="text")
    if ids == [] and read_session_params(body) is not None:
        return [[]], False  # it goes on where the session stands
    if ids is not None:
        return _read_ids(ids, context.engine.info.vocab_size)
    if text is None:
        raise RequestError(_NO_PROMPT, field="text")
    is_batch = isinstance(text, list)
    prompts = text if is_batch else [text]
    for prompt in prompts:
        if not isinstance(prompt, str):
            wrong_type("text", prompt, "a value or an array of values for StringOrList")
    if not prompts:
        raise RequestError("text cannot be empty.", field="text")
    return prompts, is_batch


def _read_ids(ids: Any, vocab_size: int) -> tuple[list[Prompt], bool]:
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return [
            parse_token_ids(item, vocab_size=vocab_size, field=f"input_ids[{index}]") for index, item in enumerate(ids)
        ], True
    return [parse_token_ids(ids, vocab_size=vocab_size)], False


def _request_ids(context: ServerContext, batch: _Batch) -> list[str]:
    name = next((name for name in ID_FIELDS if batch.body.get(name) is not None), "rid")
    value = batch.body.get(name)
    if isinstance(value, list) and batch.is_batch:
        if len(value) != batch.count:
            raise RequestError(
                "The specified rids length mismatch with the batch_size for batch processing.", field=name
            )
        ids = [parse_request_id(item, name) for item in value]
        if len(set(ids)) < len(ids):
            repeated = sorted({item for item in ids if ids.count(item) > 1})[:5]
            raise RequestError(f"Duplicate request IDs detected within the request: {repeated}", field=name)
        return ids
    base = context.new_request_id("gnt-") if value is None else parse_request_id(value, name)
    return [f"{base}_{index}" for index in range(batch.count)] if batch.is_batch else [base]


def _token_ids_logprob(batch: _Batch, vocab_size: int) -> list[tuple[int, ...]]:
    name = "token_ids_logprob"
    value = batch.body.get(name)
    if batch.is_batch and isinstance(value, list) and any(isinstance(item, list) for item in value):
        batch.check_length(name, value)
        return [parse_token_ids_logprob(item, vocab_size=vocab_size) for item in value]
    return [parse_token_ids_logprob(value, vocab_size=vocab_size)] * batch.count


def _samplings(context: ServerContext, batch: _Batch) -> list[SamplingParams]:
    shared = batch.body.get("sampling_params")
    values = batch.column("sampling_params") if isinstance(shared, list) else [shared]
    found = []
    for value in values:
        vocab_size, defaults = context.engine.info.vocab_size, context.native_defaults
        found.append(parse_sampling_params(value, vocab_size=vocab_size, defaults=defaults))
    if len({sampling.n for sampling in found}) > 1:
        raise RequestError("The parallel_sample_num should be the same for all samples in sample params.", field="n")
    if fields.boolean(batch.body, "require_reasoning"):
        found = [_behind_reasoning(context, sampling) for sampling in found]
    return found if isinstance(shared, list) else found * batch.count


def _limits_unsaid(batch: _Batch) -> list[bool]:
    """For each item whether it leaves the limit of its output to the server."""
    shared = batch.body.get("sampling_params")
    values = shared if isinstance(shared, list) else [shared] * batch.count
    return ["max_new_tokens" not in (value or {}) for value in values]


def _behind_reasoning(context: ServerContext, sampling: SamplingParams) -> SamplingParams:
    """The parameters with a grammar that begins behind the reasoning in which the output begins."""
    name = reasoning_parser_name(context)
    thinking = None
    if name is not None:
        thinking = thinking_tokens(REASONING_FORMATS[name], context.engine.tokenizer, inside=True)
    if thinking is None:
        raise RequestError(
            "require_reasoning needs a server with a --reasoning-parser whose end marker is a token of the model; "
            "leave it out, and the grammar shapes the whole output",
            field="require_reasoning",
        )
    return msgspec.structs.replace(sampling, thinking=thinking)


def read_call(context: ServerContext, body: dict[str, Any], headers: Mapping[str, str]) -> NativeCall:
    """Check a request body.

    Raises:
        RequestError: a field is wrong or asks for something that is not supported.
    """
    refuse_classifier(context)
    refuse_unsupported(body, context.config, takes_embeds=True)
    replica = wanted_replica(body, headers.get("X-Data-Parallel-Rank"), context.config.dp_size)
    stream = fields.boolean(body, "stream")
    prompts, is_batch = _read_any_prompts(context, body)
    batch = _Batch(body, len(prompts), is_batch)
    requests = _requests(context, batch, prompts, stream=stream)
    affinity = read_session_id(body)
    for request in requests:
        request.replica, request.affinity = replica, affinity
    add_transfers(requests, body, context.config, len(requests) // len(prompts))
    return NativeCall(
        requests,
        choices=len(requests) // len(prompts),
        stream=stream,
        is_batch=is_batch or len(requests) > len(prompts),
        text_in_logprobs=fields.boolean(body, "return_text_in_logprobs"),
        return_prompt_token_ids=fields.boolean(body, "return_prompt_token_ids"),
        hidden=read_hidden_states(body, context.config, requests),
    )


def _requests(
    context: ServerContext, batch: _Batch, prompts: Sequence[Prompt | Float32Array], *, stream: bool
) -> list[GenerateRequest]:
    sources = ("text", "input_ids", "input_embeds")
    source = next(name for name in sources if batch.body.get(name) is not None)
    samplings, unsaid = _samplings(context, batch), _limits_unsaid(batch)
    choices = samplings[0].n
    check_count(batch.count, choices, source)
    _refuse_lists_with_choices(batch, choices)
    ids = _request_ids(context, batch)
    extra_ids = _token_ids_logprob(batch, context.engine.info.vocab_size)
    adapters = adapter_names(context, batch.body, batch.count)
    rows, priority = batch.rows(_SCALAR_LOGPROB_FIELDS), read_priority(batch.body)
    requests = []
    for item, (prompt, sampling, row) in enumerate(zip(prompts, samplings, rows, strict=True)):
        start = fields.integer(row, "logprob_start_len", minimum=-1)
        top = fields.integer(row, "top_logprobs_num", minimum=0, maximum=LIMITS.top_logprobs)
        vectors = PromptVectors(prompt) if isinstance(prompt, np.ndarray) else None
        for choice in range(choices):
            requests.append(
                GenerateRequest(
                    request_id=ids[item] if choices == 1 else f"{ids[item]}_{choice}",
                    text=prompt if isinstance(prompt, str) else None,
                    input_ids=prompt if isinstance(prompt, list) else None,
                    embeds=vectors,
                    prompt_field=f"{source}[{item}]" if batch.is_batch else source,
                    sampling=choice_sampling(sampling, choice),
                    stream=stream,
                    return_logprob=fields.boolean(row, "return_logprob"),
                    logprob_start_len=-1 if start is None else start,
                    top_logprobs_num=top or 0,
                    token_ids_logprob=extra_ids[item],
                    priority=priority,
                    namespace=namespace_of(batch.body, item, batch.count),
                    adapter=adapters[item],
                    limit_is_default=unsaid[item],
                )
            )
    return requests


def _refuse_lists_with_choices(batch: _Batch, choices: int) -> None:
    for name in _SCALAR_LOGPROB_FIELDS if choices > 1 else ():
        if isinstance(batch.body.get(name), list):
            raise RequestError(f"Cannot use list {name} with parallel_sample_num > 1", field=name)
