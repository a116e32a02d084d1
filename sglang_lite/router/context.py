"""What the handlers of one router process share."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from sglang_lite.router.access import Access
from sglang_lite.router.admission import Admission
from sglang_lite.router.breaker import BreakerLimits
from sglang_lite.router.cors import CrossOrigin
from sglang_lite.router.hedging import Hedging
from sglang_lite.router.kv_events import KVEvents
from sglang_lite.router.kv_source import parse_endpoints
from sglang_lite.router.leases import LeaseTable
from sglang_lite.router.metrics import RouterMetrics
from sglang_lite.router.options import RouterOptions
from sglang_lite.router.policies import POLICIES, CacheAware, Policy, PolicyLimits
from sglang_lite.router.prompt import Prompt
from sglang_lite.router.prompt_tokens import PromptTokens
from sglang_lite.router.routes import DATA
from sglang_lite.router.siblings import Siblings
from sglang_lite.router.tls import WorkerTrust
from sglang_lite.router.upstream import Upstream
from sglang_lite.router.workers import Registry, Worker
from sglang_lite.server.tenants import Tenants

if TYPE_CHECKING:
    from sglang_lite.router.grpc_worker import GrpcWorkers

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RouterContext:
    """State of a router process. ``session`` exists while the application runs.

    Attributes:
        serving: calls that have no answer yet, whether a worker has them or not.
    """

    options: RouterOptions
    generator: random.Random = field(default_factory=random.SystemRandom)
    draining: bool = False
    serving: int = 0
    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    scopes: dict[int, asyncio.Timeout] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    registry: Registry = field(init=False)
    leases: LeaseTable = field(init=False)
    policies: dict[str, Policy] = field(init=False)
    access: Access = field(init=False)
    tenants: Tenants = field(init=False)
    admission: Admission = field(init=False)
    trust: WorkerTrust = field(init=False)
    cross_origin: CrossOrigin = field(init=False)
    kv_events: KVEvents = field(init=False)
    prompt_tokens: PromptTokens = field(init=False)
    session: aiohttp.ClientSession = field(init=False)
    grpc_workers: GrpcWorkers | None = None
    siblings: Siblings | None = None
    hedging: Hedging | None = None
    suspects: dict[str, asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = self.options
        self.access = Access(options, DATA)
        self.tenants = self.access.tenants or Tenants(None)
        self.admission = Admission(options)
        self.trust = WorkerTrust.of(options)
        self.cross_origin = CrossOrigin(options.cors_allowed_origins)
        breaker = BreakerLimits(
            0 if options.disable_circuit_breaker else options.cb_failure_threshold,
            options.cb_success_threshold,
            options.cb_timeout_duration_secs,
        )
        self.hedging = Hedging(options) if options.is_hedging else None
        self.registry = Registry(breaker, self._forget)
        self.registry.known_models = set(options.models)
        if self.siblings is not None:
            self.registry.cell_of = partial(self.siblings.loads.cell, self.siblings.number)
        self.leases = LeaseTable(options.stale_request_timeout_secs)
        limits = PolicyLimits(
            options.cache_threshold,
            options.balance_abs_threshold,
            options.balance_rel_threshold,
            options.max_tree_size,
            options.bucket_adjust_interval_secs,
            options.assignment_mode,
            options.max_idle_secs,
            by_beginning=options.workers > 1,
        )
        names = {
            "regular": options.policy,
            "prefill": options.prefill_policy or options.policy,
            "decode": options.decode_policy or options.policy,
        }
        self.policies = {role: POLICIES[name](limits, self.generator) for role, name in names.items()}
        self.kv_events = KVEvents(options.kv_events_max_blocks, parse_endpoints(options.kv_events_endpoints))
        self.prompt_tokens = PromptTokens(options.tokenizer_path or options.model_path, options.chat_template)
        for policy in self.policies.values():
            if isinstance(policy, CacheAware) and not options.disable_kv_events:
                policy.events = self.kv_events
        for url in options.worker_urls:
            self.registry.add(url)
        for url, port in options.prefill:
            self.registry.add(url, role="prefill", port=port)
        for url in options.decode:
            self.registry.add(url, role="decode")

    @property
    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def suspect(self, worker: Worker) -> None:
        """A request did not reach ``worker``: it is checked at once."""
        if worker.url in self.suspects:
            self.suspects[worker.url].set()

    async def suspicion(self, worker: Worker, seconds: float) -> bool:
        """Wait until ``worker`` is suspected, or for ``seconds``; whether it is."""
        event = self.suspects[worker.url] = asyncio.Event()
        try:
            async with asyncio.timeout(seconds):
                return await event.wait()
        except TimeoutError:
            return False
        finally:
            self.suspects.pop(worker.url, None)

    def learn(self, worker: Worker, info: Mapping[str, Any]) -> None:
        """Take in what a worker says of itself in ``/server_info``."""
        worker.take_info(dict(info))
        if self.options.dp_aware and not worker.is_grpc:  # gRPC cannot tell rank 0 from none
            size = info.get("dp_size")
            try:
                self.registry.split(worker, size if isinstance(size, int) else 1)
            except ValueError as error:
                logger.error("worker %s stays one worker: %s", worker.url, error)
        policy = self.policies[worker.role]
        if isinstance(policy, CacheAware) and policy.events is not None:
            for target in worker.ranks or [worker]:
                policy.events.follow(target, info)

    def choose(self, role: str, workers: Sequence[Worker], prompt: Prompt) -> Worker:
        """One of ``workers``, by the policy of their pool."""
        policy = self.policies[role]
        worker = policy.choose(workers, prompt)
        if policy.overlap is not None:
            self.metrics.overlap.observe(policy.overlap)
        return worker

    def request(
        self,
        worker: Worker,
        method: str,
        path: str,
        *,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[Upstream]:
        """A call of ``path`` (with its query) at a worker; leaving it early ends the call.

        Raises:
            aiohttp.ClientError, ConnectionError: the worker cannot be reached, or breaks its answer off.
        """
        if worker.is_grpc:
            if self.registry.workers.get(worker.url) is not worker:  # its channel would be nobody's to close
                raise ConnectionError("the worker was removed")
            return self._grpc_workers().request(worker, method, path, data, headers)
        return self.session.request(method, worker.url + path, data=data, headers=headers, allow_redirects=False)

    async def close(self) -> None:
        """End what connects to workers."""
        await self.session.close()
        await self.kv_events.close()
        if self.grpc_workers is not None:
            await self.grpc_workers.close()

    def _grpc_workers(self) -> GrpcWorkers:
        if self.grpc_workers is None:
            # Imported where it is used: its libraries are an extra.
            from sglang_lite.router.grpc_worker import GrpcWorkers

            authorities = b"".join(file.read_bytes() for file in self.trust.authorities) or None
            shown = self.trust.client
            identity = None if shown is None else (shown[1].read_bytes(), shown[0].read_bytes())
            self.grpc_workers = GrpcWorkers(self.options.stale_request_timeout_secs, authorities, identity)
        return self.grpc_workers

    def _forget(self, worker: Worker) -> None:
        if self.grpc_workers is not None:
            self.grpc_workers.forget(worker)
        self.kv_events.forget(worker)
        for policy in self.policies.values():
            policy.forget(worker)


CONTEXT: web.AppKey[RouterContext] = web.AppKey("context", RouterContext)
