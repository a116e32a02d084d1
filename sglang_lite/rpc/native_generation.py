"""Text and token generation of ``SglangService``."""

from __future__ import annotations

from typing import Any

from sglang_lite.frontend.request import GenerationOutput
from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2 as pb
from sglang_lite.rpc.generation import exact, send, sequences
from sglang_lite.rpc.inner import headers_of
from sglang_lite.rpc.status import Call, code_of
from sglang_lite.server.context import ServerContext
from sglang_lite.types import RequestError

_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_WHOLE = ("max_new_tokens", "top_k", "n", "seed", "ignore_eos", "stop_token_id")


def sampling_body(params: pb.SamplingParams) -> dict[str, Any]:
    """``sampling_params`` of ``/generate``: the fields that the client has set.

    Raises:
        RequestError: ``best_of`` asks for more sequences than are returned.
    """
    body: dict[str, Any] = {name: getattr(params, name) for name in _WHOLE if params.HasField(name)}
    body |= {name: exact(getattr(params, name)) for name in _FLOATS if params.HasField(name)}
    if params.HasField("best_of") and params.best_of != (params.n if params.HasField("n") else 1):
        raise RequestError("best_of other than n is not supported here; use the RPC Complete", field="best_of")
    if params.stop:
        body["stop"] = list(params.stop)
    if params.stop_token_ids:
        body["stop_token_ids"] = list(params.stop_token_ids)
    return body


def request_body(request: pb.TextGenerateRequest | pb.GenerateRequest, request_id: str) -> dict[str, Any]:
    """The body of ``/generate`` that says the same, without its prompt."""
    body: dict[str, Any] = {
        "rid": request_id,
        "stream": request.options.stream,
        "sampling_params": sampling_body(request.sampling_params),
    }
    if request.options.data_parallel_rank:
        body["routed_dp_rank"] = request.options.data_parallel_rank
    if request.HasField("disaggregated_params"):
        pair = request.disaggregated_params
        body["bootstrap_host"] = pair.bootstrap_host or None
        body["bootstrap_port"] = pair.bootstrap_port or None
        body["bootstrap_room"] = pair.bootstrap_room
    return body


class _Messages:
    """Messages of one call; remembers how much of each sequence was sent."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._sent: dict[int, tuple[int, int]] = {}

    def chunk(self, index: int, output: GenerationOutput) -> pb.GenerateResponse | None:
        """What is new of a sequence; None when that is nothing."""
        characters, tokens = self._sent.get(index, (0, 0))
        if len(output.text) == characters and output.completion_tokens == tokens:
            return None
        self._sent[index] = (len(output.text), output.completion_tokens)
        chunk = pb.GenerateStreamChunk(
            token_ids=output.output_ids[tokens : output.completion_tokens],
            text=output.text[characters:],
            prompt_tokens=output.prompt_tokens,
            completion_tokens=output.completion_tokens,
            cached_tokens=output.cached_tokens,
            index=index,
        )
        return pb.GenerateResponse(request_id=self._request_id, chunk=chunk)

    def complete(self, index: int, output: GenerationOutput) -> pb.GenerateResponse:
        """The end of a sequence, with all of it."""
        reason = output.finish_reason
        complete = pb.GenerateComplete(
            output_ids=output.output_ids[: output.completion_tokens],
            text=output.text,
            finish_reason="" if reason is None else reason.type,
            prompt_tokens=output.prompt_tokens,
            completion_tokens=output.completion_tokens,
            cached_tokens=output.cached_tokens,
            index=index,
        )
        return pb.GenerateResponse(request_id=self._request_id, complete=complete)

    def error(self, error: RequestError) -> pb.GenerateResponse:
        """What went wrong behind the first message."""
        told = pb.GenerateError(message=error.message, code=code_of(error.status).name)
        return pb.GenerateResponse(request_id=self._request_id, error=told)


async def generate(
    context: ServerContext,
    request: pb.TextGenerateRequest | pb.GenerateRequest,
    prompt: dict[str, Any],
    call: Call,
) -> None:
    """Send the messages of a generation: chunks where ``options.stream`` is set, and one complete a sequence.

    Args:
        prompt: ``text`` or ``input_ids`` of the body.

    Raises:
        RequestError: refused, or failed; what fails behind the first message was told in an error message too.
    """
    options = request.options
    request_id = options.request_id if options.HasField("request_id") else context.new_request_id("grpc-")
    body = {**request_body(request, request_id), **prompt}
    messages, started = _Messages(request_id), False
    try:
        async with sequences(context, body, headers_of(call, options.trace_headers)) as running:
            async for index, output in running:
                chunk = messages.chunk(index, output) if options.stream else None
                if chunk is not None:
                    await send(context, call, chunk)
                    started = True
                if output.finish_reason is not None:
                    await send(context, call, messages.complete(index, output))
                    started = True
    except RequestError as error:
        if started and error.status != 504:
            await send(context, call, messages.error(error))
        raise
