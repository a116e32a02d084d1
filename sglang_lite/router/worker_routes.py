"""The router about itself: health, models, metrics, and workers that come and go."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import msgspec
from aiohttp import web

from sglang_lite.observability.merging import merge_metrics
from sglang_lite.router.body import NOT_READ
from sglang_lite.router.context import CONTEXT, RouterContext
from sglang_lite.router.control import _json
from sglang_lite.router.errors import RouterError
from sglang_lite.router.registration import unwatch, watch
from sglang_lite.router.siblings import Handler, is_sibling
from sglang_lite.router.workers import INSTANCE, Worker, normalize_url


class NewWorker(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /workers``. Fields of SGLang's router that change nothing here are taken as they are."""

    url: str
    worker_type: str = "regular"
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    api_key: Annotated[str, msgspec.Meta(pattern=r"^[!-~]*\Z")] | None = None
    priority: int | None = None
    cost: float | None = None
    labels: dict[str, str] | None = None


def worker_id(worker: Worker) -> str:
    """The same for the same address."""
    return hashlib.sha256(worker.name.encode()).hexdigest()[:16]


async def alive(request: web.Request) -> web.Response:
    """The process answers."""
    return web.Response(text="OK")


async def ready(request: web.Request) -> web.Response:
    """Whether a request would find a worker, or a pair. Breakers are looked at, not used."""
    context = request.app[CONTEXT]
    workers = context.registry.registered()
    healthy = sum(worker.healthy for worker in workers)
    roles = {worker.role for worker in workers if worker.healthy}
    enough = {"prefill", "decode"} <= roles if context.options.is_paired else healthy > 0
    able = enough and not context.draining
    body = {
        "status": "ready" if able else "not ready",
        "healthy_workers": healthy,
        "total_workers": len(context.registry.workers),
    }
    return _json(body, 200 if able else 503)


async def models(request: web.Request) -> web.Response:
    """All models of all workers."""
    names = dict.fromkeys(worker.models[0] for worker in request.app[CONTEXT].registry.registered() if worker.models)
    return _json({"object": "list", "data": [{"id": name, "object": "model", "owned_by": "local"} for name in names]})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus metrics; needs no key."""
    context = request.app[CONTEXT]
    context.metrics.active.set(context.leases.total)
    context.metrics.waiting.set(context.admission.waiting)
    kind = {"content-type": "text/plain; version=0.0.4"}
    if context.siblings is not None:
        if is_sibling(request):
            return web.Response(body=context.metrics.text(), headers=kind)
        _show_workers(context)
        others = await context.siblings.ask_all("/metrics")
        return web.Response(body=merge_metrics([context.metrics.text(), *others]), headers=kind)
    _show_workers(context)
    return web.Response(body=context.metrics.text(), headers=kind)


def _show_workers(context: RouterContext) -> None:
    """Health and breakers, as this process sees them; others do not add theirs."""
    context.metrics.health.clear()
    context.metrics.breaker.clear()
    for worker in context.registry.targets():
        context.metrics.health.labels(worker.name).set(worker.healthy)
        context.metrics.breaker.labels(worker.name).set(worker.breaker.state.value)


async def list_workers(request: web.Request) -> web.Response:
    """Every worker, registered or not."""
    found = request.app[CONTEXT].registry.targets()
    stats = {role: sum(worker.role == role for worker in found) for role in ("prefill", "decode", "regular")}
    return _json({"workers": [_shown(worker) for worker in found], "total": len(found), "stats": stats})


async def add_worker(request: web.Request) -> web.StreamResponse:
    """Take in a worker; it is used once it has introduced itself."""
    return await _change(request, _add)


async def _change(request: web.Request, make: Handler) -> web.StreamResponse:
    siblings = request.app[CONTEXT].siblings
    return await (make(request) if siblings is None else siblings.change(request, make))


async def _add(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    try:
        wanted = msgspec.json.decode(await request.read(), type=NewWorker)
        known = _same_process(context, wanted)
        if known is not None:
            return _accepted(known)
        worker = context.registry.add(
            wanted.url, role=wanted.worker_type, port=wanted.bootstrap_port, api_key=wanted.api_key
        )
    except (*NOT_READ, ValueError) as error:
        raise RouterError("bad_request", str(error)) from None
    worker.labels = wanted.labels or {}
    watch(context, worker)
    return _accepted(worker)


def _accepted(worker: Worker) -> web.Response:
    name = worker_id(worker)
    return _json({"status": "accepted", "worker_id": name, "location": f"/workers/{name}"}, 202)


def _same_process(context: RouterContext, wanted: NewWorker) -> Worker | None:
    """The worker that registers itself again; one whose process was replaced by another is removed."""
    instance = (wanted.labels or {}).get(INSTANCE)
    known = context.registry.workers.get(normalize_url(wanted.url))
    if instance is None or known is None:
        return None
    if known.labels.get(INSTANCE) == instance:
        return known
    unwatch(context, known)
    context.registry.remove(known.url)
    return None


async def show_worker(request: web.Request) -> web.Response:
    """One worker."""
    return _json(_shown(_named(request)))


async def remove_worker(request: web.Request) -> web.StreamResponse:
    """Send nothing more to a worker (with all ranks of its server); requests that it has go on to their end."""
    return await _change(request, _remove)


async def _remove(request: web.Request) -> web.Response:
    context, worker = request.app[CONTEXT], _named(request)
    unwatch(context, worker)
    context.registry.remove(worker.url)
    return _json({"status": "accepted", "worker_id": worker_id(worker), "running": worker.load}, 202)


def start_watching(context: RouterContext) -> None:
    """Look after the workers of the options."""
    for worker in context.registry.workers.values():
        watch(context, worker)


def _named(request: web.Request) -> Worker:
    name = request.match_info["worker_id"]
    registry = request.app[CONTEXT].registry
    for worker in (*registry.workers.values(), *registry.targets()):
        if worker_id(worker) == name:
            return worker
    raise RouterError("worker_not_found", f"No worker has the id {name[:64]!r}; /workers lists those that there are.")


def _shown(worker: Worker) -> dict[str, Any]:
    return {
        "id": worker_id(worker),
        "url": worker.name,
        "model_id": worker.models[0] if worker.models else None,
        "worker_type": worker.role,
        "is_healthy": worker.healthy,
        "is_registered": worker.registered,
        "load": worker.load,
        "connection_mode": "grpc" if worker.is_grpc else "http",
        "circuit_breaker": worker.breaker.state.name.lower(),
        **({"labels": worker.labels} if worker.labels else {}),
        **({"bootstrap_port": worker.bootstrap_port} if worker.bootstrap_port is not None else {}),
    }
