"""Requests to a pair of workers: prefill computes the prompt, decode answers; both get the same body at once."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from sglang_lite.router.body import with_fields
from sglang_lite.router.call import BEGUN, Call, read_call
from sglang_lite.router.errors import NO_ATTEMPT, RouterError
from sglang_lite.router.exchange import BROKEN, FAULT, RETRIED, SHUTTING_DOWN, Reply, exchange, whole
from sglang_lite.router.lease import Lease
from sglang_lite.router.pair_side import Arrivals, Side, sequences_of
from sglang_lite.router.workers import Worker, compatible, usable

DECODE_URL = "x-sgl-decode-url"
ROOM = "x-sgl-bootstrap-room"
_NOT_COMPUTED = "The prefill worker failed before all prompts were computed; what came is not all of the answer. Retry."
_PREFILL_SECONDS = 1.0
_DECODE_SECONDS = 0.5
_Outcome = TypeVar("_Outcome")
_SERVED = frozenset({"/generate", "/v1/chat/completions", "/v1/completions"})


@dataclass(frozen=True, slots=True)
class Pair:
    """The two workers of a request."""

    prefill: Worker
    decode: Worker


def choose_pair(call: Call, tried: Collection[str] = ()) -> Pair:
    """Prefill by its policy, then decode by its own among those whose KV layout fits; workers whose names are in
    ``tried`` only where no other is left.

    Raises:
        RouterError: one pool has nobody, the layouts do not fit, or the prefill worker has no bootstrap port.
    """
    context, now = call.context, call.context.now
    workers = context.registry.of_model(call.head.model_name)
    prefills = usable([w for w in workers if w.role == "prefill"], now, "no_prefill_workers_available")
    decodes = usable([w for w in workers if w.role == "decode"], now, "no_decode_workers_available")
    matched = [prefill for prefill in prefills if any(compatible(prefill, decode) for decode in decodes)]
    if not matched:
        raise RouterError(
            "no_decode_workers_available",
            "No healthy decode worker has the KV layout of a prefill worker (page size, dtype, heads): see /workers.",
        )
    ported = [prefill for prefill in matched if prefill.bootstrap_port is not None]
    if not ported:
        raise RouterError(
            "worker_misconfigured",
            "No prefill worker names a bootstrap port: give it behind its address, --prefill URL PORT.",
        )
    fresh = [prefill for prefill in ported if prefill.name not in tried]
    prefill = context.choose("prefill", fresh or ported, call.prompt)
    fitting = [decode for decode in decodes if compatible(prefill, decode)]
    fresh = [decode for decode in fitting if decode.name not in tried]
    decode = context.choose("decode", fresh or fitting, call.prompt)
    context.metrics.affinity.labels(context.policies["decode"].reason).inc()
    return Pair(prefill, decode)


def bootstrap_fields(call: Call, prefill: Worker) -> dict[str, Any]:
    """Where decode finds prefill, and the room they meet in; a list of each for a batch."""
    count = call.head.batch_size
    if count is None:
        room = call.context.generator.getrandbits(63)
        return {"bootstrap_host": prefill.host, "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room}
    return {
        "bootstrap_host": [prefill.host] * count,
        "bootstrap_port": [prefill.bootstrap_port] * count,
        "bootstrap_room": [call.context.generator.getrandbits(63) for _ in range(count)],
    }


class _FailedError(Exception):
    """One side of a pair failed before the client got anything; another pair may do.

    Attributes:
        workers: the side, or both where either may be the reason.
        reply: what it answered.
        error: why there is no answer.
    """

    def __init__(self, *workers: Worker, reply: Reply | None = None, error: RouterError | None = None) -> None:
        super().__init__(*(worker.name for worker in workers))
        self.workers = workers
        self.reply = reply
        self.error = error


async def forward_pair(request: web.Request) -> web.StreamResponse:
    """Pass a request to a pair of workers. The client gets the answer of decode.

    Raises:
        RouterError: no pair can be had, or neither side of any could be reached.
    """
    call = await read_call(request)
    if request.path not in _SERVED:
        raise RouterError(
            "bad_request",
            f"{request.path[:100]} is not served by prefill and decode workers; ask a server of the whole model.",
        )
    options = call.context.options
    attempts = 1 if options.disable_retries else options.retry_max_retries
    tried: set[str] = set()
    failure = RouterError("internal_error", NO_ATTEMPT)
    last: Reply | None = None
    for attempt in range(attempts):
        if attempt:
            await asyncio.sleep(options.backoff(attempt, call.context.generator.random()))
        try:
            pair = choose_pair(call, tried)
        except RouterError as error:
            failure = failure if attempt else error
            break
        if attempt:
            call.context.metrics.retries.inc()
        try:
            return await _dispatch(call, pair)
        except _FailedError as error:
            tried.update(worker.name for worker in error.workers)
            last, failure = error.reply, error.error or failure
    if last is not None:
        return whole(last, call.request_id)
    raise failure


async def _dispatch(call: Call, pair: Pair) -> web.StreamResponse:
    """Send to both, to meet in a new room. An attempt that fails ends at both. A prefill worker that cannot be reached
    or leaves ends it at once, as its KV will never come; one that answers with another error a moment later: decode may
    know what to say by itself, but not always at once."""
    fields = bootstrap_fields(call, pair.prefill)
    body = with_fields(call.body, call.head, fields)
    extra = {DECODE_URL: pair.decode.url, ROOM: msgspec.json.encode(fields["bootstrap_room"]).decode()}
    arrivals = Arrivals()
    sent = asyncio.create_task(_prefill(call, pair.prefill, body, Side(extra)))
    answered = asyncio.create_task(_decode(call, pair.decode, body, Side(extra, arrivals)))
    both: set[asyncio.Task[Any]] = {sent, answered}
    patience = 0.0
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            refused = await _refused(call, pair.prefill, sent, answered, arrivals)
            if refused is not None:
                return whole(refused, call.request_id)
        response, reply = await _outcome(pair.decode, answered)
        patience = _PREFILL_SECONDS
        if response is not None:
            return response
        assert reply is not None
        if reply.status in RETRIED:
            patience = 0.0
            raise _FailedError(*_reasons(call, pair, sent, reply), reply=reply)
        if call.head.return_logprob is True and reply.status == 200:
            reply = _merge_logprobs(await _outcome(pair.prefill, sent), reply)
        return whole(reply, call.request_id)
    finally:
        try:
            if patience:  # decode has its answer: prefill has sent its pages, and its own answer is only waited for
                await asyncio.wait({sent}, timeout=patience)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)


async def _refused(
    call: Call, worker: Worker, sent: asyncio.Task[Reply], answered: asyncio.Task[Any], arrivals: Arrivals
) -> Reply | None:
    """What prefill, which is first to be done, refuses the request with, if decode does not say anything by itself.
    None where decode goes on: it has all KV pages, or has answered.

    Raises:
        RouterError: it took too long, or the client has the beginning of an answer that will never be whole.
        _FailedError: prefill failed, and the client has nothing yet.
    """
    failure = _failure(sent)
    if failure is None:
        arrivals.is_watched = False
        return None
    if BEGUN in call.request or (isinstance(failure, Reply) and failure.status != SHUTTING_DOWN):
        await asyncio.wait({answered}, timeout=_DECODE_SECONDS)
        if answered.done():
            return None
    if BEGUN in call.request:
        if arrivals.has(sequences_of(call)):
            return None
        raise RouterError("upstream_unreachable", _NOT_COMPUTED)
    if isinstance(failure, RouterError):
        await _outcome(worker, sent)
    assert isinstance(failure, Reply)
    if failure.status == FAULT:  # decode, which waits, is not the reason
        worker.breaker.fail(call.context.now, failure.is_probe)
    if failure.status < HTTPStatus.BAD_REQUEST:
        raise _FailedError(worker, error=RouterError("upstream_unreachable", BROKEN))
    if failure.status in RETRIED:
        raise _FailedError(worker, reply=failure)
    return failure


def _failure(sent: asyncio.Task[Reply]) -> Reply | RouterError | None:
    """Why prefill has not sent all that decode needs; None where it has, or is not done."""
    if not sent.done():
        return None
    error = sent.exception()
    if isinstance(error, RouterError):
        return error
    reply = sent.result()
    is_stream = reply.headers.get("content-type", "").startswith("text/event-stream")
    is_cut = is_stream and b'"error":' in reply.body and not reply.body.rstrip().endswith(b"[DONE]")
    return reply if reply.status >= HTTPStatus.BAD_REQUEST or is_cut else None


def _reasons(call: Call, pair: Pair, sent: asyncio.Task[Reply], reply: Reply) -> tuple[Worker, ...]:
    """Who is not to be tried again, once decode has failed with ``reply``. Each side fails where the other does, and
    either may be the first to say so."""
    failure = _failure(sent)
    if not sent.done() or (isinstance(failure, Reply) and failure.status == FAULT):
        return pair.prefill, pair.decode
    if failure is not None:
        return (pair.prefill,)
    if reply.status == FAULT:
        pair.decode.breaker.fail(call.context.now, reply.is_probe)
    return (pair.decode,)


async def _outcome(worker: Worker, task: asyncio.Task[_Outcome]) -> _Outcome:
    """What the call of one side came to.

    Raises:
        RouterError: it took too long.
        _FailedError: the worker could not be reached, or another request has the probe of its breaker.
    """
    try:
        return await task
    except RouterError as error:
        if error.code not in ("upstream_unreachable", "breaker_open"):
            raise
        raise _FailedError(worker, error=error) from error


async def _prefill(call: Call, worker: Worker, body: bytes, side: Side) -> Reply:
    """The whole answer of prefill, streamed or not.

    Raises:
        RouterError: the worker could not be reached.
    """
    call.context.policies["prefill"].sent(worker, call.prompt)
    async with Lease(call.context, worker) as lease:
        _, reply = await exchange(call, worker, body, lease, side)
        assert reply is not None
        return reply


async def _decode(
    call: Call, worker: Worker, body: bytes, side: Side
) -> tuple[web.StreamResponse | None, Reply | None]:
    call.context.policies["decode"].sent(worker, call.prompt)
    async with Lease(call.context, worker) as lease:
        return await exchange(call, worker, body, lease, side)


def _merge_logprobs(prefill: Reply, decode: Reply) -> Reply:
    """Log probabilities of the prompt are known to prefill only: they go before those of decode."""
    if prefill.status != 200:
        return decode
    try:
        ours, theirs = msgspec.json.decode(decode.body), msgspec.json.decode(prefill.body)
    except msgspec.DecodeError:
        return decode
    pairs = zip(ours, theirs, strict=False) if isinstance(ours, list) else [(ours, theirs)]
    for mine, other in pairs:
        if not isinstance(mine, dict) or not isinstance(other, dict):
            return decode
        before = (other.get("meta_info") or {}).get("input_token_logprobs")
        meta = mine.get("meta_info")
        if isinstance(before, list) and isinstance(meta, dict):
            meta["input_token_logprobs"] = before + (meta.get("input_token_logprobs") or [])
    return Reply(decode.status, decode.headers, msgspec.json.encode(ours))
