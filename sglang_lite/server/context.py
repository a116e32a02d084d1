"""What every route needs: the engine, the configuration, the metrics and where the server is in its life."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from sglang_lite.frontend.chat_template import ChatTemplate
from sglang_lite.frontend.openai_sampling import default_sampling
from sglang_lite.frontend.request_ids import RequestIds
from sglang_lite.frontend.sessions import SessionStore
from sglang_lite.models.stored_values import checkpoint_stamp
from sglang_lite.observability.explain import RecentSequences
from sglang_lite.observability.tracing import RequestTracer
from sglang_lite.server.served_weights import ServedWeights
from sglang_lite.server.tenants import Tenants
from sglang_lite.types import RequestError

if TYPE_CHECKING:
    from sglang_lite.config import ServerConfig
    from sglang_lite.disaggregation.engine_info import EngineInfoTable
    from sglang_lite.engine.adapter_registry import AdapterRegistry
    from sglang_lite.engine.info import EngineInfo, LoadSnapshot
    from sglang_lite.engine.messages import MemoryTag
    from sglang_lite.engine.shared_claims import SharedClaims
    from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
    from sglang_lite.frontend.tokenizer import Tokenizer
    from sglang_lite.models.description import ModelDescription
    from sglang_lite.observability.metrics import ServerMetrics
    from sglang_lite.server.classification import ScoreHead
    from sglang_lite.server.peers import Peers
    from sglang_lite.types import ProfileOptions


class ServingEngine(Protocol):
    """What the HTTP front asks of an engine (``engine.async_engine.AsyncEngine`` provides it).

    ``generate`` yields cumulative snapshots, the last one with a finish reason; closing it early aborts the request.
    It raises ``RequestError`` before the first snapshot when the request cannot be served.
    """

    config: ServerConfig
    description: ModelDescription
    tokenizer: Tokenizer | None
    stats: LoadSnapshot
    adapters: AdapterRegistry
    front: int
    claims: SharedClaims | None

    @property
    def info(self) -> EngineInfo: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def failure(self) -> str | None: ...
    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationOutput, None]: ...
    def abort(self, request_id: str, *, exact: bool = False) -> bool: ...
    async def abort_all(self) -> int: ...
    async def flush_cache(self, timeout: float = 0.0) -> bool: ...
    async def loads(self) -> LoadSnapshot: ...
    async def replica_loads(self) -> list[tuple[int, LoadSnapshot]]: ...
    def look(self) -> bool: ...
    async def pause(self, mode: str = "abort") -> None: ...
    async def resume(self) -> None: ...
    async def update_weights(self, path: str) -> None: ...
    async def release_memory(self, tags: tuple[MemoryTag, ...]) -> None: ...
    async def resume_memory(self, tags: tuple[MemoryTag, ...]) -> None: ...
    def change_stream_interval(self, tokens: int) -> None: ...
    async def start_profile(self, options: ProfileOptions) -> None: ...
    async def stop_profile(self) -> str: ...
    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> None: ...
    async def unload_adapter(self, name: str) -> None: ...


class Phase(enum.Enum):
    """Where the server is between binding its port and leaving."""

    WARMING = "warming up"
    READY = "ready"
    DRAINING = "shutting down"


class ServerContext:
    """State shared by the routes of one application.

    Args:
        engine: started.
        launch_command: the command line with secrets removed, for ``/server_info``.

    Attributes:
        config: the engine's configuration.
        metrics: None without ``--enable-metrics``.
        peers: the other front processes of the server, None when this is the only one; set before the application.
        port: where the server listens, 0 until it does.
        phase: set by whoever runs the server.
        is_responsive: the engine's loop answered lately (see ``heartbeat``).
        paused: ``/pause_generation`` was called and not yet undone.
        chat_template: None without a tokenizer.
        weights: what is served now; operators may replace them.
        native_defaults, chat_defaults: sampling parameters for keys that a request leaves out.
        requests_in_flight: generation requests between arrival and the end of their reply.
        idle: set while there are none.
        tracer: None without ``--enable-trace``.
        tenants: who shares the engine under fair scheduling, None without it.
        engine_infos: what ranks registered at the engine-info service, None on a server without it.
        recent: sequences that run or ended lately, and where their time went.
        sessions: conversations that this front keeps.
        score_head: of a classification model, once it was read (``server.classification``).

    Raises:
        StartupError: the chat template is not valid, the tenants are not, or tracing is not installed.
    """

    def __init__(self, engine: ServingEngine, *, launch_command: str = "") -> None:
        config = engine.config
        self.engine = engine
        self.config = config
        self.launch_command = launch_command
        self.metrics: ServerMetrics | None = None
        self.peers: Peers | None = None
        self.port = 0
        self.phase = Phase.WARMING
        self.is_responsive = True
        self.paused = False
        self.startup_seconds: dict[str, float] = {}
        self.chat_template: ChatTemplate | None = None
        if engine.tokenizer is not None:
            self.chat_template = ChatTemplate.for_tokenizer(
                engine.tokenizer,
                override=config.chat_template,
                default_variables=config.default_chat_template_kwargs,
            )
        recommended: Mapping[str, Any] = {}
        if config.sampling_defaults == "model":
            recommended = engine.description.generation_defaults
        self.native_defaults = default_sampling({}, config.preferred_sampling_params)
        self.chat_defaults = default_sampling(recommended, config.preferred_sampling_params)
        self.requests_in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.tenants = Tenants.of(config) if config.fair_scheduling else None
        self.recent = RecentSequences()
        self.sessions = SessionStore()
        self.score_head: ScoreHead | None = None
        self.engine_infos: EngineInfoTable | None = None
        self.tracer: RequestTracer | None = None
        if config.enable_trace:
            self.tracer = RequestTracer.to_collector(config.otlp_traces_endpoint, config.public_name)
        path = config.model_path or ""
        self.weights = ServedWeights(path, config.weight_version, checkpoint_stamp(path))
        self._request_ids = RequestIds(engine.front)

    def change_options(self, changes: dict[str, Any]) -> None:
        """Replace options that are looked at for every request; the values are known to be right."""
        self.config = self.config.model_copy(update=changes)
        if "stream_interval" in changes:
            self.engine.change_stream_interval(changes["stream_interval"])

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self.config.public_name

    @property
    def accepted_model_names(self) -> tuple[str, ...]:
        """Names that a request may put into ``model``."""
        return (self.config.public_name, self.weights.path, "default")

    def new_request_id(self, prefix: str) -> str:
        """An id that this server never gives again."""
        return self._request_ids.make(time.time_ns(), prefix)

    @contextmanager
    def generation(self, limit: int | None = None) -> Iterator[None]:
        """Count a generation request for as long as it takes.

        Raises:
            RequestError: 503, the front processes of the server together have ``limit`` of them.
        """
        claims = self.engine.claims
        is_full = limit is not None and self.requests_in_flight >= limit
        if is_full or (claims is not None and not claims.enter(limit)):
            raise RequestError(f"the server has {limit} requests in flight (--max-concurrent-requests)", status=503)
        self.requests_in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            if claims is not None:
                claims.leave()
            self.requests_in_flight -= 1
            if self.requests_in_flight == 0:
                self.idle.set()


CONTEXT: web.AppKey[ServerContext] = web.AppKey("context", ServerContext)


def context_of(request: web.Request) -> ServerContext:
    """The context of the application that got ``request``."""
    return request.app[CONTEXT]
