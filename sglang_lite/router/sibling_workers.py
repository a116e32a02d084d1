"""The set of workers is the same in all processes of a router, also in one that was away while it changed.

Process 0 counts the changes in shared memory and sends each with its number. Who misses one, or could not make it,
takes the whole set over from process 0 within ``LOOK_SECONDS``.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec
from aiohttp import web

from sglang_lite.router.body import NOT_READ
from sglang_lite.router.context import CONTEXT, RouterContext
from sglang_lite.router.discovery import SOURCE
from sglang_lite.router.errors import NO_SUCH_PATH, RouterError
from sglang_lite.router.registration import unwatch, watch
from sglang_lite.router.siblings import KnownWorker, KnownWorkers, Siblings, is_sibling

logger = logging.getLogger(__name__)

KNOWN = "/internal/workers"
LOOK_SECONDS = 0.5


async def known_workers(request: web.Request) -> web.Response:
    """The workers as another process of this router takes them over."""
    context = request.app[CONTEXT]
    if context.siblings is None or not is_sibling(request):
        raise RouterError("not_found", NO_SUCH_PATH)
    found = [
        KnownWorker(url=w.url, role=w.role, port=w.bootstrap_port, api_key=w.api_key, labels=w.labels)
        for w in context.registry.workers.values()
    ]
    body = msgspec.json.encode(KnownWorkers(revision=context.siblings.revision, workers=found))
    return web.Response(body=body, content_type="application/json")


async def take_over_workers(context: RouterContext) -> None:
    """A process that was started again learns which workers have come and gone since the router began."""
    siblings = context.siblings
    if siblings is None or not siblings.is_new:
        return
    bodies = await siblings.ask_all(KNOWN)
    answers = [msgspec.json.decode(body, type=KnownWorkers) for body in bodies]
    if answers:
        newest = max(answers, key=lambda answer: answer.revision)
        _apply(context, newest.workers, with_found=True, is_running=False)
        siblings.revision = newest.revision
    if siblings.number == 0:
        siblings.revision = siblings.loads.revision  # what it has is what the others have to have


async def keep_up(context: RouterContext, siblings: Siblings) -> None:
    """Take the set over from process 0 whenever a change was missed, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if siblings.is_behind:
            try:
                await _catch_up(context, siblings)
            except (aiohttp.ClientError, OSError, TimeoutError, *NOT_READ) as error:
                logger.warning("process 0 does not tell the workers: %s %s", type(error).__name__, error)


async def _catch_up(context: RouterContext, siblings: Siblings) -> None:
    async with siblings.changing:
        status, body = await siblings.call(0, "GET", KNOWN)
        if status == 200:
            known = msgspec.json.decode(body, type=KnownWorkers)
            _apply(context, known.workers, with_found=False, is_running=True)
            siblings.revision = known.revision


def _apply(context: RouterContext, known: list[KnownWorker], *, with_found: bool, is_running: bool) -> None:
    """Make the set that of ``known``. Workers of the cluster each process finds by itself, but for those
    ``with_found``, which it may begin with."""
    registry = context.registry
    wanted = {one.url: one for one in known if with_found or SOURCE not in one.labels}
    for url, worker in list(registry.workers.items()):
        one = wanted.get(url)
        if one is not None and (one.labels, one.api_key) == (worker.labels, worker.api_key):
            del wanted[url]
        elif one is not None or with_found or SOURCE not in worker.labels:
            unwatch(context, worker)
            registry.remove(url)
    for url, one in wanted.items():
        try:
            worker = registry.add(url, role=one.role, port=one.port, api_key=one.api_key)
        except ValueError as error:
            logger.warning("a worker of process 0 cannot be used: %s", error)
            continue
        worker.labels = one.labels
        if is_running:
            watch(context, worker)
