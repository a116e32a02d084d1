"""Requests to a pair of workers: prefill computes the prompt, decode answers; both get the same body at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from sglang_lite.router.body import with_fields
from sglang_lite.router.call import Call, read_call
from sglang_lite.router.errors import RouterError
from sglang_lite.router.exchange import Reply, exchange, whole
from sglang_lite.router.lease import Lease
from sglang_lite.router.workers import Worker, compatible, usable

DECODE_URL = "x-sgl-decode-url"
ROOM = "x-sgl-bootstrap-room"
_SERVED = frozenset({"/generate", "/v1/chat/completions", "/v1/completions"})


@dataclass(frozen=True, slots=True)
class Pair:
    """The two workers of a request."""

    prefill: Worker
    decode: Worker


def choose_pair(call: Call) -> Pair:
    """Prefill by its policy, then decode by its own among those whose KV layout fits.

    Raises:
        RouterError: one pool has nobody, the layouts do not fit, or the prefill worker has no bootstrap port.
    """
    context, now = call.context, call.context.now
    workers = context.registry.of_model(call.head.model_name)
    prefills = usable([w for w in workers if w.role == "prefill"], now, "no_prefill_workers_available")
    decodes = usable([w for w in workers if w.role == "decode"], now, "no_decode_workers_available")
    matched = [prefill for prefill in prefills if any(compatible(prefill, decode) for decode in decodes)]
    if not matched:
        raise RouterError("no_decode_workers_available", "No decode worker has the KV layout of the prefill workers.")
    ported = [prefill for prefill in matched if prefill.bootstrap_port is not None]
    if not ported:
        raise RouterError("worker_misconfigured", "The prefill worker has no bootstrap port.")
    prefill = context.choose("prefill", ported, call.prompt)
    fitting = [decode for decode in decodes if compatible(prefill, decode)]
    decode = context.choose("decode", fitting, call.prompt)
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


async def forward_pair(request: web.Request) -> web.StreamResponse:
    """Pass a request to a pair of workers. The client gets the answer of decode.

    Raises:
        RouterError: no pair can be had, or neither side of any could be reached.
    """
    call = await read_call(request)
    if request.path not in _SERVED:
        raise RouterError("bad_request", f"{request.path[:100]} is not served by prefill and decode workers.")
    options = call.context.options
    attempts = 1 if options.disable_retries else options.retry_max_retries
    failure: RouterError | None = None
    for attempt in range(attempts):
        try:
            pair = choose_pair(call)
        except RouterError as error:
            raise failure or error from None
        if attempt:
            call.context.metrics.retries.inc()
            await asyncio.sleep(options.backoff(attempt, call.context.generator.random()))
        try:
            return await _dispatch(call, pair)
        except RouterError as error:
            if error.code != "upstream_unreachable":
                raise
            failure = error
    raise failure or RouterError("internal_error", "No attempt was made.")


async def _dispatch(call: Call, pair: Pair) -> web.StreamResponse:
    """Send to both. A prefill worker that cannot be reached ends the attempt, as its KV will never come; one that
    answers with an error does not: decode knows by itself what to say."""
    fields = bootstrap_fields(call, pair.prefill)
    body = with_fields(call.body, call.head, fields)
    extra = {DECODE_URL: pair.decode.url, ROOM: msgspec.json.encode(fields["bootstrap_room"]).decode()}
    sent = asyncio.create_task(_prefill(call, pair.prefill, body, extra))
    answered = asyncio.create_task(_decode(call, pair.decode, body, extra))
    both: set[asyncio.Task[Any]] = {sent, answered}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if sent.done() and not answered.done() and "stream" not in call.request:
            sent.result()
        response, reply = await answered
        if response is not None:
            return response
        assert reply is not None
        if call.head.return_logprob is True and reply.status == 200:
            reply = _merge_logprobs(await sent, reply)
        return whole(reply, call.request_id)
    finally:
        if answered.done() and not answered.cancelled() and answered.exception() is None:
            # Decode has its answer: prefill has sent its pages, and its own answer is only waited for.
            await asyncio.wait({sent}, timeout=1.0)
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _prefill(call: Call, worker: Worker, body: bytes, extra: dict[str, str]) -> Reply:
    """The whole answer of prefill, streamed or not.

    Raises:
        RouterError: the worker could not be reached.
    """
    call.context.policies["prefill"].sent(worker, call.prompt)
    async with Lease(call.context, worker) as lease:
        return await exchange_whole(call, worker, body, lease, extra)


async def _decode(
    call: Call, worker: Worker, body: bytes, extra: dict[str, str]
) -> tuple[web.StreamResponse | None, Reply | None]:
    call.context.policies["decode"].sent(worker, call.prompt)
    async with Lease(call.context, worker) as lease:
        return await exchange(call, worker, body, lease, extra)


async def exchange_whole(call: Call, worker: Worker, body: bytes, lease: Lease, extra: dict[str, str]) -> Reply:
    """``exchange`` that reads even a stream as a whole."""
    _, reply = await exchange(call, worker, body, lease, extra, whole_stream=True)
    assert reply is not None
    return reply


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
