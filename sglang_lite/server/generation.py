"""Running the sequences of one HTTP request: all to the end, or merged into one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import msgspec

from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.server.context import Phase, ServerContext
from sglang_lite.server.tenants import assign_tenant
from sglang_lite.types import RequestError

Start = Callable[[GenerateRequest], AsyncGenerator[GenerationOutput, None]]


async def run_sequence(context: ServerContext, request: GenerateRequest) -> AsyncGenerator[GenerationOutput, None]:
    """Snapshots of one sequence, with its metrics kept. Closing the generator aborts the sequence."""
    with ExitStack() as stack:
        observers: list[Callable[[GenerationOutput], None]] = []
        if context.metrics is not None:
            tracker = context.metrics.track(streaming=request.stream, structured=request.sampling.grammar is not None)
            observers.append(stack.enter_context(tracker).observe)
        observers.append(stack.enter_context(context.recent.track(request.request_id)))
        if context.tracer is not None:
            observers.append(stack.enter_context(context.tracer.track(request.request_id)))
        if request.turn is not None:
            observers.append(request.turn.observe)
        async with aclosing(context.engine.generate(request)) as snapshots:
            async for output in snapshots:
                for observe in observers:
                    observe(output)
                yield output


def raise_on_failure(context: ServerContext, output: GenerationOutput) -> GenerationOutput:
    """``output``, unless the server ended it.

    Raises:
        RequestError: the finish reason is an abort with a status (time-out, full queue, engine failure), or the
            server is leaving. An abort that the client asked for has no status and is a normal result.
    """
    reason = output.finish_reason
    if reason is None or reason.type != "abort":
        return output
    if reason.status_code is not None:
        raise RequestError(reason.message or "the request was aborted", status=reason.status_code)
    if context.phase is Phase.DRAINING:
        raise RequestError("the server is shutting down and ended the request", status=503)
    return output


def _is_aborted(output: GenerationOutput) -> bool:
    return output.finish_reason is not None and output.finish_reason.type == "abort"


async def _last_output(
    context: ServerContext, snapshots: AsyncGenerator[GenerationOutput, None], request_id: str
) -> GenerationOutput:
    last: GenerationOutput | None = None
    async with aclosing(snapshots):
        async for output in snapshots:
            last = output
    if last is None or last.finish_reason is None:
        raise RequestError(f"request {request_id!r} ended without a result", status=500)
    return raise_on_failure(context, last)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _last_outputs(
    context: ServerContext, requests: Sequence[GenerateRequest], start: Start
) -> list[GenerationOutput]:
    """Run all ``requests`` in parallel; the first failure ends the others."""
    if len(requests) == 1:
        return [await _last_output(context, start(requests[0]), requests[0].request_id)]
    tasks = [asyncio.create_task(_last_output(context, start(one), one.request_id)) for one in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(tasks)


async def prefill_prompts(
    context: ServerContext, requests: Sequence[GenerateRequest], choices: int
) -> list[GenerationOutput]:
    """Compute every prompt that has several choices once, so that the choices find it in the prefix cache.

    Args:
        requests: prompt-major.
        choices: sequences of each prompt.

    Returns:
        One output of zero tokens a prompt; empty when there is nothing to share.
    """
    if choices == 1 or context.config.disable_radix_cache:
        return []
    prompts = []
    for request in requests[::choices]:
        sampling = msgspec.structs.replace(request.sampling, max_new_tokens=0, min_new_tokens=0)
        first = replace(request, request_id=f"{request.request_id}_prompt", sampling=sampling, stream=False)
        prompts.append(replace(first, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0))
    return await _last_outputs(context, prompts, context.engine.generate)


def _of_their_prompts(
    requests: Sequence[GenerateRequest], prompts: Sequence[GenerationOutput], choices: int
) -> list[GenerationOutput]:
    """Results of choices that never ran, because computing their prompts was aborted."""
    return [replace(prompts[index // choices], request_id=request.request_id) for index, request in enumerate(requests)]


async def collect(
    context: ServerContext, requests: Sequence[GenerateRequest], choices: int = 1
) -> list[GenerationOutput]:
    """Run all sequences to their end, in parallel; outputs in the order of ``requests``.

    Raises:
        RequestError: one of them could not be served or was ended by the server; the others are aborted.
    """
    assign_tenant(requests)
    prompts = await prefill_prompts(context, requests, choices)
    if any(map(_is_aborted, prompts)):
        return _of_their_prompts(requests, prompts, choices)
    outputs = await _last_outputs(context, requests, partial(run_sequence, context))
    for index, output in enumerate(outputs if prompts else ()):
        output.cached_tokens = prompts[index // choices].cached_tokens
    return outputs


class MergedStream:
    """The sequences of one request as one stream of (index, newest snapshot).

    Use it as an asynchronous context manager; leaving it aborts what still runs. A snapshot that was not read when
    the next one of the same sequence arrives is replaced by it: snapshots are cumulative, so nothing is lost and a
    slow reader costs no memory.
    """

    def __init__(self, context: ServerContext, requests: Sequence[GenerateRequest], choices: int = 1) -> None:
        assign_tenant(requests)
        self._context = context
        self._requests = requests
        self._choices = choices
        self._prompts: list[GenerationOutput] = []
        self._newest: dict[int, GenerationOutput] = {}
        self._ready: deque[int] = deque()
        self._wake = asyncio.Event()
        self._running = 0
        self._failure: Exception | None = None
        self._single: AsyncGenerator[GenerationOutput, None] | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> MergedStream:
        if len(self._requests) == 1:
            self._single = run_sequence(self._context, self._requests[0])
            await self._stack.enter_async_context(aclosing(self._single))
            return self
        self._prompts = await prefill_prompts(self._context, self._requests, self._choices)
        if any(map(_is_aborted, self._prompts)):
            outputs = _of_their_prompts(self._requests, self._prompts, self._choices)
            self._newest = dict(enumerate(outputs))
            self._ready.extend(self._newest)
            return self
        self._running = len(self._requests)
        tasks = [asyncio.create_task(self._pump(i, request)) for i, request in enumerate(self._requests)]
        self._stack.push_async_callback(_cancel, tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def __aiter__(self) -> MergedStream:
        return self

    async def __anext__(self) -> tuple[int, GenerationOutput]:
        """The next snapshot and the index of its sequence.

        Raises:
            RequestError: a sequence could not be served or was ended by the server.
        """
        if self._single is not None:
            return 0, raise_on_failure(self._context, await anext(self._single))
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            if self._running == 0:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        index = self._ready.popleft()
        output = raise_on_failure(self._context, self._newest.pop(index))
        if self._prompts:
            output.cached_tokens = self._prompts[index // self._choices].cached_tokens
        return index, output

    async def _pump(self, index: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(run_sequence(self._context, request)) as snapshots:
                async for output in snapshots:
                    if index not in self._newest:
                        self._ready.append(index)
                    self._newest[index] = output
                    self._wake.set()
        except Exception as error:  # whatever it is, the reader of the stream has to hear of it
            self._failure = self._failure or error
        finally:
            self._running -= 1
            self._wake.set()
