"""Control calls to every worker of a model, and what workers report together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from sglang_lite.router.body import NOT_READ
from sglang_lite.router.call import CALL_ID, forwarded_headers
from sglang_lite.router.context import CONTEXT, RouterContext
from sglang_lite.router.errors import NOT_AN_OBJECT, UNREACHABLE, RouterError, too_slow
from sglang_lite.router.exchange import Reply, whole
from sglang_lite.router.upstream import check_status
from sglang_lite.router.workers import Worker

_LOAD_SECONDS = 5.0
_LARGEST = 2**53
"""Of counts; sums of more than these are no JSON that others read."""


@dataclass(frozen=True, slots=True)
class Fan:
    """How the answers to a control call are summed up: the name of the count, and fields of the request shown."""

    count: str = "affected_workers"
    shown: tuple[str, ...] = ()


FANS: dict[str, Fan] = {
    "/flush_cache": Fan("flushed_workers"),
    "/abort_request": Fan("affected_workers", ("abort_all", "rid")),
    "/pause_generation": Fan(),
    "/continue_generation": Fan(),
    "/start_profile": Fan(),
    "/stop_profile": Fan(),
    "/update_weights_from_disk": Fan("updated_workers", ("load_format",)),
    "/update_weight_version": Fan("updated_workers", ("new_version",)),
}
ONE = ("/get_weights_by_name", "/remote_instance_transfer_engine_info", "/get_remote_instance_transfer_engine_info")


async def _object(request: web.Request) -> dict[str, Any]:
    """The body as an object, an empty one when there is none.

    Raises:
        RouterError: it is something else.
    """
    data = await request.read()
    if not data.strip():
        return {}
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except NOT_READ:
        raise RouterError("bad_request", NOT_AN_OBJECT) from None


async def call_worker(request: web.Request, worker: Worker, data: bytes) -> Reply:
    """The same call to one worker.

    Raises:
        RouterError: upstream_unreachable or upstream_timeout.
    """
    context = request.app[CONTEXT]
    headers = forwarded_headers(request, request[CALL_ID])
    if worker.api_key:
        headers["authorization"] = f"Bearer {worker.api_key}"
    try:
        async with (
            asyncio.timeout(context.options.request_timeout_secs),
            context.request(worker, request.method, request.path_qs, data=data or None, headers=headers) as response,
        ):
            check_status(response.status)
            kind = response.headers.get("content-type", "application/json")
            return Reply(response.status, {"content-type": kind}, await response.read())
    except TimeoutError:
        raise RouterError("upstream_timeout", too_slow(context.options.request_timeout_secs)) from None
    except (aiohttp.ClientError, ConnectionError) as error:
        raise RouterError("upstream_unreachable", UNREACHABLE) from error


async def call_all(request: web.Request, workers: Sequence[Worker], data: bytes) -> list[Reply]:
    """The same call to all workers at once.

    Raises:
        RouterError: one of them could not be reached; the others got the call all the same.
    """
    replies = await asyncio.gather(*(call_worker(request, worker, data) for worker in workers), return_exceptions=True)
    failed = [reply for reply in replies if isinstance(reply, BaseException)]
    for error in failed:
        if isinstance(error, RouterError) and len(workers) > 1:
            rest = f"{len(failed)} of {len(workers)} workers failed, the others got the call."
            raise RouterError(error.code, f"{error.message} {rest}", error.headers)
        raise error
    return [reply for reply in replies if isinstance(reply, Reply)]


async def fan_out(request: web.Request) -> web.Response:
    """Every worker of the model gets the call once; the first answer that is no success is returned as it is."""
    context, fan, fields = request.app[CONTEXT], FANS[request.path], await _object(request)
    model = fields.get("model")
    workers = context.registry.of_model(model if isinstance(model, str) else None)
    replies = await call_all(request, workers, await request.read())
    for reply in replies:
        if reply.status >= 300:
            return whole(reply, request[CALL_ID])
    bodies = [_decoded(reply) for reply in replies]
    body: dict[str, Any] = {
        "success": all(answer.get("success", True) for answer in bodies),
        "message": f"{request.path} reached {len(replies)} workers.",
        fan.count: len(replies),
        "model": model,
        **{name: fields.get(name) for name in fan.shown},
    }
    if request.path == "/abort_request":  # a request is at one worker (or a pair): the others do not know it
        body["aborted_workers"] = sum(answer.get("success") is True for answer in bodies)
        body["success"] = body["aborted_workers"] > 0 or fields.get("abort_all") is True
    if request.path == "/update_weights_from_disk":
        body["num_paused_requests"] = sum(_count(answer.get("num_paused_requests")) for answer in bodies)
    return _json(body)


async def ask_one(request: web.Request) -> web.Response:
    """One worker, of the prefill pool where there is one, answers for all of its model."""
    context, fields = request.app[CONTEXT], await _object(request)
    if "transfer_engine_info" in request.path:
        rank = request.query.get("rank", "")
        if not rank.isdigit():
            raise RouterError(
                "bad_request", f"The query must name a rank, a number from 0 (?rank=0), got {rank[:40]!r}."
            )
    model = fields.get("model")
    workers = context.registry.of_model(model if isinstance(model, str) else None)
    prefills = [worker for worker in workers if worker.role == "prefill"] or workers
    asked = next((worker for worker in prefills if worker.healthy), prefills[0])
    reply = await call_worker(request, asked, await request.read())
    answer = _decoded(reply)
    if reply.status >= 300 or not answer:
        return whole(reply, request[CALL_ID])
    return _json({**answer, "queried_workers": 1, "model": model, "worker_type": asked.role})


async def poll_transfers(request: web.Request) -> web.Response:
    """The transfers of all workers together."""
    replies = await call_all(request, request.app[CONTEXT].registry.of_model(None), await request.read())
    total: dict[str, Any] = {"completed_batches": 0, "pending_batches": 0}
    for reply in replies:
        if reply.status >= 300:
            return whole(reply, request[CALL_ID])
        for name, value in _decoded(reply).items():
            if isinstance(value, list) and isinstance(total.setdefault(name, []), list):
                total[name] = total[name] + value
            elif isinstance(total.get(name, 0), int) and (count := _count(value)):
                total[name] = total.get(name, 0) + count
    return _json(total)


async def loads(request: web.Request) -> web.Response:
    """The load of every worker; -1 for one that does not say."""
    context = request.app[CONTEXT]
    workers = context.registry.registered()
    found = await asyncio.gather(*(_load(context, worker) for worker in workers))
    entries = [
        {"worker": worker.url, "worker_type": worker.role, "load": load}
        for worker, load in zip(workers, found, strict=True)
    ]
    known = [load for load in found if load >= 0]
    return _json(
        {
            "loads": entries,
            "aggregate": {"total_tokens": sum(known)},
            "total_workers": len(workers),
            "successful": len(known),
            "failed": len(workers) - len(known),
        }
    )


async def _load(context: RouterContext, worker: Worker) -> int:
    key = worker.api_key or context.options.api_key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with (
            asyncio.timeout(_LOAD_SECONDS),
            context.request(worker, "GET", "/v1/loads", headers=headers) as response,
        ):
            if response.status != 200:
                return -1
            body = msgspec.json.decode(await response.read(), type=dict[str, Any])
            load = int(body["aggregate"]["total_tokens"])
            return load if 0 <= load < _LARGEST else -1
    except (aiohttp.ClientError, ConnectionError, TimeoutError, *NOT_READ, KeyError, TypeError, ValueError):
        return -1


def _count(value: Any) -> int:
    """A count that a worker told; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST else 0


def _decoded(reply: Reply) -> dict[str, Any]:
    """The object that a worker answered; some answer text, which is none."""
    try:
        return msgspec.json.decode(reply.body, type=dict[str, Any])
    except NOT_READ:
        return {}


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
