"""A prefill and a decode engine in one process: disaggregation for tests and for experiments with one device."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import random
import threading
from concurrent.futures import Future
from typing import Any

import msgspec

from sglang_lite import startup
from sglang_lite.config import ServerConfig
from sglang_lite.disaggregation.base import MAX_ROOM
from sglang_lite.disaggregation.bootstrap_server import bootstrap_site
from sglang_lite.disaggregation.build import advertised_host
from sglang_lite.disaggregation.http_site import HttpSite
from sglang_lite.engine.build import build_core_parts
from sglang_lite.engine.core import EngineCore
from sglang_lite.engine.disaggregated import make_role
from sglang_lite.engine.frames import Command, ControlEvent
from sglang_lite.engine.info import LoadSnapshot
from sglang_lite.engine.limits import PreparedPrompt
from sglang_lite.engine.local import WatchingTransport
from sglang_lite.engine.messages import Flush, Load, LoadGrammar, QueryLoad, Reply, Shutdown
from sglang_lite.engine.offline import Engine
from sglang_lite.engine.parts import Build, CoreParts
from sglang_lite.engine.roles import Role
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.types import OutputColumns, RequestColumns, RequestError, RequestExtras, StartupError, TransferParams

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
GRACE_SECONDS = 1.0
"""How long the transfers of an engine that ends may take to stop."""

_REPLY_SECONDS = 60.0


class DisaggregatedEngine(Engine):
    """An ``Engine`` whose prompts are computed by a second engine of this process.

    Their KV pages go from one pool to the other over a transfer engine, as between two servers. The model is loaded
    twice, and each side has a pool of its own, so give ``max_total_tokens`` where memory is short.

    >>> with DisaggregatedEngine(model_path="demo", device="cpu", disaggregation_transfer_backend="tcp") as engine:
    ...     engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 8})["text"]

    Args:
        config: as for ``Engine``; both sides have it, but for their roles.
        build: makes the parts of each.

    Raises:
        StartupError: the configuration cannot be served, or the pages cannot be transferred.
    """

    _is_paired = True

    def __init__(self, config: ServerConfig | None = None, *, build: Build = build_core_parts, **options: Any) -> None:
        given = (config if config is not None else ServerConfig()).resolved(**options)
        if given.tp_size > 1:
            raise StartupError(
                f"--tp-size {given.tp_size} must be 1 for two engines in this process: use servers with a role each"
            )
        given = given.resolved(host=HOST, disaggregation_zmq_ports=None, disaggregation_mooncake_rpc_port=0)
        self._rooms = itertools.count(random.getrandbits(32) << 30)
        self._host = advertised_host(HOST)
        self._site = _SiteThread(bootstrap_site(self._host, 0))
        self._prefill: _PrefillCore | None = None
        try:
            port = self._site.port
            prefill = given.resolved(
                disaggregation_mode="prefill", disaggregation_bootstrap_port=port, disaggregation_fallback="none"
            )
            self._prefill = _PrefillCore(prefill, build)
            super().__init__(given.resolved(disaggregation_mode="decode"), build=build)
        except BaseException:
            self._close_prefill()
            raise

    def flush_cache(self) -> bool:
        """Empty the prefix caches of both sides; False while one of them has requests."""
        prefill = self._partner.ask(Flush(0, next(self._calls), 1.0))
        return super().flush_cache() and isinstance(prefill, Reply) and prefill.ok

    def prefill_load(self) -> LoadSnapshot:
        """Load and counters of the prefill side now; those of the decode side are ``load``'s."""
        reply = self._partner.ask(QueryLoad(0, next(self._calls)))
        return reply.snapshot if isinstance(reply, Load) else LoadSnapshot()

    @property
    def _partner(self) -> _PrefillCore:
        if self._prefill is None:
            raise RequestError("the engine was shut down; make a new one", status=503)
        return self._prefill

    def _make_role(self, parts: CoreParts) -> Role | None:
        return make_role(self.config, parts)

    def _prepare(self, request: GenerateRequest) -> PreparedPrompt:
        if request.return_logprob and request.logprob_start_len >= 0:
            raise RequestError(
                "logprob_start_len must be -1: this engine does not score prompts; use Engine",
                field="logprob_start_len",
            )
        return super()._prepare(request)

    def _admit(self, columns: RequestColumns) -> None:
        columns.extras = {
            index: msgspec.structs.replace(columns.extras.get(index, RequestExtras()), transfer=self._pair(key))
            for index, key in enumerate(columns.key.tolist())
        }
        self._partner.put(dataclasses.replace(columns))
        super()._admit(columns)

    def _pair(self, key: int) -> TransferParams:
        return TransferParams(self._host, self._site.port, next(self._rooms) & MAX_ROOM, rid=f"local-{key}")

    def _control(self, command: Any) -> Reply | Load:
        if isinstance(command, LoadGrammar):
            reply = self._partner.ask(command)
            if isinstance(reply, Reply) and not reply.ok:
                return reply
        return super()._control(command)

    def _close_core(self) -> None:
        if self._role is not None:
            self._role.close(GRACE_SECONDS)
        super()._close_core()
        if isinstance(self._stepped.transport, WatchingTransport):
            self._stepped.transport.close()
        self._close_prefill()

    def _close_prefill(self) -> None:
        prefill, self._prefill = self._prefill, None
        if prefill is not None:
            prefill.close()
        self._site.close()


class _PrefillCore:
    """The core of the prefill side, in a thread of its own.

    Args:
        config: not prepared yet.
    """

    def __init__(self, config: ServerConfig, build: Build) -> None:
        config = startup.prepare(config)
        self._parts = build(config, lambda message, fraction: None)
        try:
            self._role = make_role(config, self._parts)
        except BaseException:
            self._parts.executor.close()
            raise
        self._transport = WatchingTransport(self._take_output, self._take_event, self._role.fileno())
        self._core = EngineCore(
            self._parts.scheduler,
            self._parts.executor,
            self._transport,
            depth=self._parts.depth,
            grammars=self._parts.grammars,
            role=self._role,
        )
        self._calls: dict[int, Future[Reply | Load]] = {}
        self._thread = threading.Thread(target=self._run, name="prefill core", daemon=True)
        self._thread.start()

    def put(self, command: Command) -> None:
        self._transport.put(command)

    def ask(self, command: Flush | QueryLoad | LoadGrammar) -> Reply | Load:
        """The answer to a command."""
        future = self._calls[command.call] = Future()
        self._transport.put(command)
        return future.result(_REPLY_SECONDS)

    def close(self) -> None:
        """End the thread, the sessions and the executor."""
        self._transport.put(Shutdown())
        self._thread.join()
        self._transport.close()
        self._parts.executor.close()

    def _run(self) -> None:
        try:
            self._core.run()
        except Exception:  # a fault of the engine: requests that wait for it must hear of it
            logger.exception("the prefill side failed")
        finally:
            self._role.close(GRACE_SECONDS)

    def _take_output(self, columns: OutputColumns) -> None:
        """The decode side tells the client, failures too."""

    def _take_event(self, event: ControlEvent) -> None:
        if isinstance(event, (Reply, Load)) and (future := self._calls.pop(event.call, None)) is not None:
            future.set_result(event)


class _SiteThread:
    """A service on a loop of its own."""

    def __init__(self, site: HttpSite) -> None:
        self._site = site
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bootstrap server", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(site.start(), self._loop).result()
        except OSError:
            self._end()
            raise
        self.port = site.port

    def close(self) -> None:
        """May be called again."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._site.stop(), self._loop).result()
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
