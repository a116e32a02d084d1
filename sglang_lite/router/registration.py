"""Getting to know workers, and looking after them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from sglang_lite.router.body import NOT_READ
from sglang_lite.router.context import RouterContext
from sglang_lite.router.workers import Worker

logger = logging.getLogger(__name__)

_INFO_SECONDS = 2.0
_INFO_ATTEMPTS = 3
_INFO_BACKOFF = 0.1


class NotReadyError(Exception):
    """The worker did not introduce itself; ``final`` when asking again at once would not help."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


def watch(context: RouterContext, worker: Worker) -> None:
    """Look after ``worker`` until it is removed."""
    context.tasks[worker.url] = asyncio.create_task(_keep_watch(context, worker))


def unwatch(context: RouterContext, worker: Worker) -> None:
    """Stop looking after it."""
    task = context.tasks.pop(worker.url, None)
    if task is not None:
        task.cancel()


async def register(context: RouterContext, worker: Worker) -> None:
    """Ask a worker what it is.

    Raises:
        NotReadyError: it does not say, after three attempts or at once where another would be in vain.
    """
    for attempt in range(_INFO_ATTEMPTS):
        try:
            context.learn(worker, await _server_info(context, worker))
            return
        except NotReadyError as error:
            if error.final or attempt == _INFO_ATTEMPTS - 1:
                raise
        await asyncio.sleep(_INFO_BACKOFF * 2**attempt)


async def _keep_watch(context: RouterContext, worker: Worker) -> None:
    while True:
        try:
            await _look_after(context, worker)
        except Exception:  # a fault of ours must not leave a worker without anybody who looks after it
            logger.exception("fault while looking after worker %s", worker.url)
            await asyncio.sleep(context.options.worker_startup_check_interval)
        else:
            return


async def _look_after(context: RouterContext, worker: Worker) -> None:
    """Until it is removed, or given up."""
    options = context.options
    deadline = context.now + options.worker_startup_timeout_secs
    while not worker.registered:
        try:
            await register(context, worker)
        except NotReadyError as error:
            if context.now > deadline:
                _give_up(context, worker, str(error))
                return
            await asyncio.sleep(options.worker_startup_check_interval)
    logger.info("worker %s is there: %s, models %s", worker.url, worker.role, ", ".join(worker.models))
    well_at = context.now
    while not options.disable_health_check:
        suspected = await context.suspicion(worker, options.health_check_interval_secs)
        was = worker.healthy
        passed = await check(context, worker)
        if suspected and not passed:
            if not await _come_back(context, worker, well_at):
                return
            well_at = context.now
            continue
        well_at = context.now if passed else well_at
        if _is_over(context, worker, well_at):
            return
        worker.note_check(passed, options.health_failure_threshold, options.health_success_threshold)
        if was != worker.healthy:
            logger.warning("worker %s is %s", worker.url, "healthy again" if worker.healthy else "not healthy")


def _give_up(context: RouterContext, worker: Worker, reason: str) -> None:
    logger.error("gave worker %s up: %s", worker.url, reason)
    context.registry.remove(worker.url)
    context.tasks.pop(worker.url, None)


def _is_over(context: RouterContext, worker: Worker, well_at: float) -> bool:
    """Whether a worker that comes by itself has been silent for so long that it is given up: one that was killed never
    leaves, and its next process may have another address."""
    if not worker.comes_by_itself or context.now - well_at <= context.options.worker_startup_timeout_secs:
        return False
    _give_up(context, worker, "it has not answered for too long")
    return True


async def _come_back(context: RouterContext, worker: Worker, well_at: float) -> bool:
    """A worker that requests do not reach any more, nor does a check: ask until it is there again; False when it was
    given up.

    Restarts are short, and the next worker's may follow at once: so this does not wait for the next regular check,
    nor for a breaker, and what the worker says of itself is read anew.
    """
    logger.warning("worker %s is gone", worker.url)
    worker.healthy, worker.lost = False, True
    while worker.lost:
        await asyncio.sleep(context.options.worker_startup_check_interval)
        if await check(context, worker):
            with suppress(NotReadyError):
                await register(context, worker)
        elif _is_over(context, worker, well_at):
            return False
    logger.info("worker %s is back", worker.url)
    return True


async def check(context: RouterContext, worker: Worker) -> bool:
    """One health check."""
    path = "/health" if worker.is_grpc else context.options.health_check_endpoint
    try:
        async with (
            asyncio.timeout(context.options.health_check_timeout_secs),
            context.request(worker, "GET", path) as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        return False


async def _server_info(context: RouterContext, worker: Worker) -> dict[str, Any]:
    key = worker.api_key or context.options.api_key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    for path in ("/server_info", "/get_server_info"):
        try:
            async with (
                asyncio.timeout(_INFO_SECONDS),
                context.request(worker, "GET", path, headers=headers) as response,
            ):
                status, data = response.status, await response.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise NotReadyError(f"{path}: {type(error).__name__} {error}") from error
        if status == 404 and path == "/server_info":
            continue
        if status != 200:
            raise NotReadyError(f"{path}: status {status}", final=400 <= status < 500)
        try:
            info = msgspec.json.decode(data, type=dict[str, Any])
        except NOT_READ as error:
            raise NotReadyError(f"{path}: {error}", final=True) from error
        return info
    raise NotReadyError("neither /server_info nor /get_server_info exists", final=True)
