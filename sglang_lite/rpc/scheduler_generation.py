"""Generation of ``SglangScheduler``: token ids in and out, with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict

from sglang_lite.frontend.request import FinishReason, GenerationOutput, TokenLogprobs
from sglang_lite.rpc.generated.sglang.grpc.scheduler import sglang_scheduler_pb2 as pb
from sglang_lite.rpc.generation import exact, prompt_ids, send, sequences
from sglang_lite.rpc.inner import headers_of
from sglang_lite.rpc.status import Call
from sglang_lite.server.context import ServerContext
from sglang_lite.types import RequestError

_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_WHOLE = (
    "top_k",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "n",
    "min_new_tokens",
    "ignore_eos",
    "no_stop_trim",
)
_OPTIONAL = ("max_new_tokens", "stream_interval")
_CONSTRAINTS = {
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf_grammar": "ebnf",
    "structural_tag": "structural_tag",
}


def sampling_body(params: pb.SamplingParams) -> dict[str, Any]:
    """``sampling_params`` of ``/generate``. Fields without presence are read as sent: the caller fills them in."""
    body: dict[str, Any] = {name: exact(getattr(params, name)) for name in _FLOATS}
    body |= {name: getattr(params, name) for name in _WHOLE}
    body |= {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        body[_CONSTRAINTS[constraint]] = getattr(params, constraint)
    if params.stop:
        body["stop"] = list(params.stop)
    if params.stop_token_ids:
        body["stop_token_ids"] = list(params.stop_token_ids)
    if params.logit_bias:
        body["logit_bias"] = {token: exact(bias) for token, bias in params.logit_bias.items()}
    if params.HasField("custom_params"):
        body["custom_params"] = MessageToDict(params.custom_params)
    return body


def refuse_media(inputs: Any) -> None:
    """Raises RequestError when there are images, video or audio."""
    if inputs.ByteSize():
        raise RequestError("mm_inputs is not supported: this server takes text and token ids only", field="mm_inputs")


def request_body(request: pb.GenerateRequest, request_id: str) -> dict[str, Any]:
    """The body of ``/generate`` that says the same, without its prompt.

    Raises:
        RequestError: what the request asks for has no counterpart here.
    """
    refuse_media(request.mm_inputs)
    body: dict[str, Any] = {
        "rid": request_id,
        "stream": request.stream,
        "return_logprob": request.return_logprob,
        "top_logprobs_num": request.top_logprobs_num,
        "require_reasoning": request.require_reasoning,
        "return_hidden_states": request.return_hidden_states,
    }
    if request.HasField("sampling_params"):
        body["sampling_params"] = sampling_body(request.sampling_params)
    if request.return_logprob:
        body["logprob_start_len"] = request.logprob_start_len
    if request.token_ids_logprob:
        body["token_ids_logprob"] = list(request.token_ids_logprob)
    if request.HasField("data_parallel_rank"):
        body["routed_dp_rank"] = request.data_parallel_rank
    if request.lora_id:
        body["lora_path"] = request.lora_id
    if request.HasField("disaggregated_params"):
        pair = request.disaggregated_params
        body["bootstrap_host"] = pair.bootstrap_host or None
        body["bootstrap_port"] = pair.bootstrap_port or None
        body["bootstrap_room"] = pair.bootstrap_room
    if request.custom_logit_processor:
        body["custom_logit_processor"] = request.custom_logit_processor  # refused, with the reason
    if request.input_embeds:
        body["input_embeds"] = list(request.input_embeds)  # refused too
    return body


def _tops(pairs: Sequence[tuple[float, int]]) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=[value for value, _ in pairs], token_ids=[token for _, token in pairs])


def _output_logprobs(positions: Sequence[TokenLogprobs]) -> pb.OutputLogProbs | None:
    if not positions:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[position.logprob or 0.0 for position in positions],
        token_ids=[position.token_id for position in positions],
        top_logprobs=[_tops(position.top) for position in positions if position.top],
        token_ids_logprobs=[_tops(position.extra) for position in positions if position.extra],
    )


def _input_logprobs(positions: Sequence[TokenLogprobs]) -> pb.InputLogProbs | None:
    if not positions:
        return None
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=position.logprob) for position in positions],
        token_ids=[position.token_id for position in positions],
        top_logprobs=[_tops(position.top) for position in positions if position.top],
    )


class _Messages:
    """Messages of one call; remembers how much of each sequence was sent."""

    def __init__(self, request: pb.GenerateRequest, request_id: str) -> None:
        self._request = request
        self._request_id = request_id
        self._sent: dict[int, int] = {}

    def _scores(self, output: GenerationOutput, first: int) -> dict[str, Any]:
        """Log-probabilities from output token ``first`` on; those of the prompt come with the first token."""
        if not self._request.return_logprob:
            return {}
        shown = output.input_logprobs
        if self._request.return_hidden_states:  # the engine has then scored the whole prompt
            start = self._request.logprob_start_len
            shown = shown[output.prompt_tokens if start < 0 else start :]
        return {
            "output_logprobs": _output_logprobs(output.output_logprobs[first : output.completion_tokens]),
            "input_logprobs": None if first else _input_logprobs(shown),
        }

    def chunk(self, index: int, output: GenerationOutput) -> pb.GenerateResponse | None:
        """What is new of a sequence; None when that is nothing."""
        first = self._sent.get(index, 0)
        if output.completion_tokens == first:
            return None
        self._sent[index] = output.completion_tokens
        chunk = pb.GenerateStreamChunk(
            token_ids=output.output_ids[first : output.completion_tokens],
            prompt_tokens=output.prompt_tokens,
            completion_tokens=output.completion_tokens,
            cached_tokens=output.cached_tokens,
            index=index,
            **self._scores(output, first),
        )
        return pb.GenerateResponse(request_id=self._request_id, chunk=chunk)

    def complete(self, index: int, output: GenerationOutput, reason: FinishReason) -> pb.GenerateResponse:
        """The end of a sequence, with all of it."""
        guessed = [] if output.timeline is None else output.timeline.guessed
        complete = pb.GenerateComplete(
            output_ids=output.output_ids[: output.completion_tokens],
            finish_reason=reason.type,
            prompt_tokens=output.prompt_tokens,
            completion_tokens=output.completion_tokens,
            cached_tokens=output.cached_tokens,
            index=index,
            all_hidden_states=self._states(output),
            spec_draft_tokens=guessed[0] if guessed else 0,
            spec_accepted_tokens=sum(count * times for count, times in enumerate(guessed[1:])),
            **self._scores(output, 0),
        )
        if isinstance(reason.matched, int):
            complete.matched_token_id = reason.matched
        elif isinstance(reason.matched, str):
            complete.matched_stop_str = reason.matched
        return pb.GenerateResponse(request_id=self._request_id, complete=complete)

    def _states(self, output: GenerationOutput) -> list[pb.HiddenStates]:
        """The states behind the last layer, by position; none unless they were asked for."""
        if not self._request.return_hidden_states or not output.hidden_states:
            return []
        rows = np.concatenate(output.hidden_states)
        return [pb.HiddenStates(values=row.tolist(), layer=-1, position=place) for place, row in enumerate(rows)]


async def generate(context: ServerContext, request: pb.GenerateRequest, call: Call) -> None:
    """Send chunks where ``stream`` is set, and one complete message a sequence.

    Raises:
        RequestError: refused, or failed.
    """
    request_id = request.request_id or context.new_request_id("grpc-")
    messages = _Messages(request, request_id)
    body = request_body(request, request_id)
    body["input_ids"] = prompt_ids(context, request.tokenized.input_ids, call)
    async with sequences(context, body, headers_of(call)) as running:
        async for index, output in running:
            chunk = messages.chunk(index, output) if request.stream else None
            if chunk is not None:
                await send(context, call, chunk)
            if output.finish_reason is not None:
                await send(context, call, messages.complete(index, output, output.finish_reason))
