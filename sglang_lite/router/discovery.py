"""Workers that come and go with the pods of a Kubernetes cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sglang_lite.router.context import RouterContext
from sglang_lite.router.kubernetes_api import ApiError, ClusterAccess, KubernetesApi
from sglang_lite.router.kubernetes_objects import Found, key_of, resource_path, version_of, workers_of
from sglang_lite.router.registration import unwatch, watch
from sglang_lite.router.workers import Worker

logger = logging.getLogger(__name__)

SOURCE = "source"
"""Label of workers that were found, with the selector that found them."""

_FIRST_WAIT, _LONGEST_WAIT = 0.2, 30.0
_SHORT_SECONDS = 1.0
_BROKEN = (ApiError, aiohttp.ClientError, OSError, TimeoutError)


@dataclass(eq=False, slots=True)
class Pool:
    """The workers of one selector.

    Attributes:
        selector: ``label=value`` terms with commas between.
        role: what the workers are until they say so themselves.
    """

    context: RouterContext
    selector: str
    role: str
    _objects: dict[str, list[Found]] = field(default_factory=dict)
    _ours: dict[str, Worker] = field(default_factory=dict)
    _refused: set[str] = field(default_factory=set)

    def replace_all(self, objects: list[dict[str, Any]]) -> None:
        """A new list: what is not in it is gone, and so is what another process of this router has found before."""
        for url, worker in self.context.registry.workers.items():
            if worker.labels.get(SOURCE) == self._source:
                self._ours.setdefault(url, worker)
        self._objects = {key_of(value): self._workers_of(value) for value in objects}
        self._settle(anew=True)

    def take(self, kind: str, value: Mapping[str, Any]) -> None:
        """A change of one object."""
        if kind == "DELETED":
            self._objects.pop(key_of(value), None)
        elif kind in ("ADDED", "MODIFIED"):
            self._objects[key_of(value)] = self._workers_of(value)
        else:
            return
        self._settle()

    @property
    def _source(self) -> str:
        return f"kubernetes {self.selector}"

    def _workers_of(self, value: Mapping[str, Any]) -> list[Found]:
        options = self.context.options
        return workers_of(
            options.service_discovery_resource,
            value,
            options.service_discovery_protocol,
            options.service_discovery_port,
        )

    def _settle(self, anew: bool = False) -> None:
        """Make the registry hold what was found; workers that somebody else has named are left alone. Those that could
        not be had are tried again when others are gone, or with ``anew``."""
        registry = self.context.registry
        wanted = {found.url: found for workers in self._objects.values() for found in workers}
        self._refused &= wanted.keys()
        gone = [url for url in self._ours if url not in wanted]
        for url in gone:
            worker = self._ours.pop(url)
            if registry.workers.get(url) is worker:
                unwatch(self.context, worker)
                registry.remove(url)
                self.context.metrics.lost.inc()
                logger.info("worker %s is gone from the cluster", url)
        for url, found in wanted.items():
            if url in registry.workers or (url in self._refused and not (gone or anew)):
                continue
            try:
                worker = registry.add(url, role=self.role, port=found.bootstrap_port)
            except ValueError as error:
                if url not in self._refused:  # once, not at every change of the cluster
                    logger.warning("a worker of the cluster cannot be used: %s", error)
                self._refused.add(url)
                continue
            worker.labels = {SOURCE: self._source}
            self._ours[url] = worker
            watch(self.context, worker)
            self.context.metrics.found.inc()
            logger.info("worker %s was found in the cluster", url)


async def follow(api: KubernetesApi, pool: Pool, *, first_wait: float = _FIRST_WAIT) -> None:
    """Keep ``pool`` as the cluster is, until cancelled. Without the API server its workers stay as they are.

    A watch that ends or breaks goes on from the last version that was seen. A version that is too old, and an answer
    that makes no sense, is followed by a new list.
    """
    options = pool.context.options
    path = resource_path(options.service_discovery_resource, options.service_discovery_namespace)
    version: str | None = None
    failures = 0
    loop = asyncio.get_running_loop()
    while True:
        try:
            if version is None:
                objects, version = await api.list(path, pool.selector)
                pool.replace_all(objects)
            began = loop.time()
            async for kind, value in api.watch(path, pool.selector, version):
                failures = 0
                version = version_of(value) or version
                pool.take(kind, value)
            # The server ends watches now and then; one that does so at once is not asked in a hurry.
            failures = failures + 1 if loop.time() - began < _SHORT_SECONDS else 0
            wait = _pause(first_wait, failures)
        except _BROKEN as error:
            if isinstance(error, ApiError):
                version = None
            is_gone = isinstance(error, ApiError) and error.is_gone
            wait = _pause(first_wait, failures)
            failures += 1
            level = logging.DEBUG if is_gone and failures == 1 else logging.WARNING
            logger.log(level, "watching the cluster for %s: %s %s", pool.selector, type(error).__name__, error)
        await asyncio.sleep(wait * (0.5 + 0.5 * pool.context.generator.random()))


def _pause(first: float, failures: int) -> float:
    return min(_LONGEST_WAIT, first * 2.0 ** min(failures, 12))


def pools(context: RouterContext) -> Iterator[Pool]:
    """What the options ask to be followed."""
    options = context.options
    for words, role in (
        (options.selector, "regular"),
        (options.prefill_selector, "prefill"),
        (options.decode_selector, "decode"),
    ):
        if words:
            yield Pool(context, ",".join(words), role)


async def discover(context: RouterContext, access: ClusterAccess) -> None:
    """Follow the cluster until cancelled."""
    try:
        async with KubernetesApi(access) as api, asyncio.TaskGroup() as group:
            for pool in pools(context):
                group.create_task(follow(api, pool))
    except Exception:  # nobody waits for this task: what ends it has to be seen
        logger.exception("discovery of workers has ended")
        raise
