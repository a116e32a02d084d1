"""AsyncEngine: generation as asynchronous iterators over an engine core in its own process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Self

import msgspec

from sglang_lite import startup
from sglang_lite.config import ServerConfig
from sglang_lite.engine.adapter_registry import AdapterRegistry, LoadedAdapter
from sglang_lite.engine.carried_out import to_the_end
from sglang_lite.engine.client import EngineClient
from sglang_lite.engine.control_calls import FRONT
from sglang_lite.engine.info import EngineInfo, LoadSnapshot
from sglang_lite.engine.launcher import CORE_COMMAND
from sglang_lite.engine.messages import MemoryTag, PauseMode
from sglang_lite.engine.pulse import Patience
from sglang_lite.engine.replicas import ReplicaClient, merge_loads
from sglang_lite.engine.request_flow import RequestFlow
from sglang_lite.engine.shared_claims import SharedClaims
from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.models.adapter_settings import NamedAdapter, adapter_settings
from sglang_lite.models.description import ModelDescription, read_description
from sglang_lite.types import OutputColumns, ProfileOptions, RequestError

logger = logging.getLogger(__name__)

PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")

Progress = Callable[[str, float], None]


class AsyncEngine:
    """Serves requests of one event loop. Made by ``start``; ``async with`` closes it.

    Attributes:
        config: as prepared for serving (local paths, decided policy).
        info: facts of the engine core.
        tokenizer: None with ``skip_tokenizer_init``.
        description: the model as its files describe it.
        stats: the newest load report, about one second old while the engine works.
        front: number of this front.
        claims: what the fronts of the server know together; None where there is one.
    """

    def __init__(
        self,
        config: ServerConfig,
        description: ModelDescription,
        tokenizer: Tokenizer | None,
        client: EngineClient | ReplicaClient,
        info: EngineInfo,
        *,
        front: int = FRONT,
        claims: SharedClaims | None = None,
    ) -> None:
        self.config = config
        self.description = description
        self.tokenizer = tokenizer
        self.stats = LoadSnapshot()
        self.info = info
        self._client = client
        # One after the other: the front and the core must not disagree about which of two calls came last.
        self._pausing = asyncio.Lock()
        self.adapters = AdapterRegistry(adapter_settings(config))
        self.front = front
        self.claims = claims
        self._flow = RequestFlow(config, tokenizer, client, info, self.adapters, front=front, claims=claims)
        self._patience = Patience.of(config.watchdog_timeout)

    @classmethod
    async def start(
        cls,
        config: ServerConfig,
        *,
        progress: Progress | None = None,
        timeout: float | None = None,
        command: Sequence[str] = CORE_COMMAND,
    ) -> Self:
        """Check the configuration, start the engine core and wait until it serves.

        Args:
            progress: called with (message, fraction or a negative number) while the core starts.
            timeout: seconds the core may take; None to wait as long as it lives.
            command: how the core process is started.

        Raises:
            StartupError: the configuration cannot be served, or the core did not start.
        """
        config = await asyncio.to_thread(startup.prepare, config)
        client: EngineClient | ReplicaClient
        if config.dp_size == 1:
            client = EngineClient(progress)
        else:
            client = ReplicaClient(config, progress)
        fronts = config.tokenizer_worker_num
        start = client.start(config.to_json(), timeout=timeout, command=command, fronts=fronts)
        starting = asyncio.create_task(start)
        try:
            # While the core loads its libraries and weights.
            description, tokenizer = await asyncio.to_thread(_read_text_side, config)
            info = await starting
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await client.close(grace=0.0)
            raise
        claims = SharedClaims.create(client.directories[0]) if fronts > 1 else None
        engine = cls(config, description, tokenizer, client, info, claims=claims)
        client.listen(engine)
        return engine

    @classmethod
    async def attach(cls, config: ServerConfig, info: EngineInfo, directories: Sequence[str], front: int) -> Self:
        """Use the core, or the cores, of another front process.

        Args:
            config: as that front has prepared it; info: what its core said of itself.
            directories: those of that front's engine.
            front: number of this front, from 1 to ``tokenizer_worker_num`` - 1, used by no other.
        """
        description, tokenizer = await asyncio.to_thread(_read_text_side, config)
        client: EngineClient | ReplicaClient
        if config.dp_size == 1:
            client = EngineClient(front=front)
            client.attach(directories[0])
        else:
            client = ReplicaClient(config, front=front)
            client.attach(directories)
        claims = SharedClaims.attach(directories[0])
        engine = cls(config, description, tokenizer, client, info, front=front, claims=claims)
        client.listen(engine)
        return engine

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def is_alive(self) -> bool:
        """Whether the core can serve."""
        return self._client.failure is None

    @property
    def failure(self) -> str | None:
        """Why the core is gone, None while it lives."""
        return self._client.failure

    @property
    def directories(self) -> list[str]:
        """Private directories of the sockets of the cores that this front has started, by replica."""
        return self._client.directories

    @property
    def lost_replicas(self) -> dict[int, str]:
        """Replicas that are gone while others serve, and why."""
        return self._client.lost if isinstance(self._client, ReplicaClient) else {}

    def lose_replica(self, replica: int, reason: str) -> None:
        """The front that has started a replica says that it is gone."""
        if isinstance(self._client, ReplicaClient):
            self._client.lose_replica(replica, reason)

    @property
    def num_live(self) -> int:
        """Requests whose iterators are still open."""
        return self._flow.num_live

    async def close(self, grace: float = 5.0) -> None:
        """End the core. Requests still running end with an abort."""
        self._flow.fail_all("the engine was shut down", 503)
        await self._client.close(grace)
        await self._flow.close()
        if self.claims is not None:
            self.claims.close()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationOutput, None]:
        """Generate one sequence.

        Yields cumulative snapshots; the last one has a finish reason. A reader that is slower than the engine gets
        fewer, larger steps. Without ``request.stream`` there is one snapshot, at the end. Leaving the iterator early
        aborts the request.

        Raises:
            RequestError: before the first snapshot: bad input, a duplicate id, a full queue, a paused or dead engine.
        """
        return self._flow.generate(request)

    def abort(self, request_id: str, *, exact: bool = False) -> bool:
        """Abort the requests whose id starts with ``request_id``, or is just that; whether there was one."""
        return self._flow.abort(request_id, exact=exact)

    async def abort_all(self) -> int:
        """Abort everything the core has; returns how many requests that was."""
        self._flow.mark_all_aborted()
        return await self._client.abort_all()

    async def flush_cache(self, timeout: float = 0.0) -> bool:
        """Empty the prefix cache; False when requests are still there after ``timeout`` seconds."""
        self._flow.send_unsent()
        if self._flow.grammars is not None:
            self._flow.grammars.clear()
        return await self._client.flush(timeout)

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> None:
        """Load a low-rank adapter; requests may use it from then on.

        Args:
            name: what requests call it.
            path: directory with adapter_config.json and adapter_model.safetensors, on the engine's machine.
            pinned: kept for information; an adapter stays until it is unloaded in any case.

        Raises:
            RequestError: the name is taken, there is no room, or the adapter cannot be used; the message says why.
        """
        self._flow.check_serving()
        adapter = self.adapters.reserve(NamedAdapter(name=name, path=path, pinned=pinned))
        await to_the_end(self._fill_slot(adapter, path))

    async def _fill_slot(self, adapter: LoadedAdapter, path: str) -> None:
        try:
            await self._client.load_adapter(adapter.slot, path)
        except BaseException:
            self.adapters.forget(adapter)
            raise
        adapter.ready = True

    async def unload_adapter(self, name: str) -> None:
        """Unload a low-rank adapter once the requests that use it have ended; no new one can use it meanwhile.

        Raises:
            RequestError: there is no such adapter.
        """
        await to_the_end(self._empty_slot(self.adapters.retire(name)))

    async def _empty_slot(self, adapter: LoadedAdapter) -> None:
        try:
            await adapter.unused.wait()
            self._flow.send_unsent()
            await self._client.unload_adapter(adapter.slot)
        except BaseException:
            adapter.ready = True  # it is still where it was
            raise
        self.adapters.forget(adapter)

    async def update_weights(self, path: str) -> None:
        """Replace the weights by those of a directory of the same model; requests that come meanwhile wait.

        Raises:
            RequestError: requests run, or the directory cannot be used; what was served stays.
        """
        self._flow.send_unsent()
        await self._client.update_weights(path)

    async def release_memory(self, tags: tuple[MemoryTag, ...]) -> None:
        """Give the engine's memory for the KV pool or the weights back; requests are refused until it is resumed.

        Raises:
            RequestError: requests run.
        """
        self._flow.send_unsent()
        await to_the_end(self._release_memory(tags))

    async def _release_memory(self, tags: tuple[MemoryTag, ...]) -> None:
        before = self._flow.released
        self._flow.released = before | set(tags)
        try:
            await self._client.release_memory(tags)
        except RequestError:
            self._flow.released = before
            raise

    async def resume_memory(self, tags: tuple[MemoryTag, ...]) -> None:
        """Take that memory again.

        Raises:
            RequestError: 503, it cannot be had; the engine stays without it.
        """
        await to_the_end(self._resume_memory(tags))

    async def _resume_memory(self, tags: tuple[MemoryTag, ...]) -> None:
        await self._client.resume_memory(tags)
        self._flow.released -= set(tags)

    def change_stream_interval(self, tokens: int) -> None:
        """Tokens between two snapshots of requests that come from now on."""
        self._flow.processor.stream_interval = tokens

    async def start_profile(self, options: ProfileOptions) -> None:
        """Record the steps of the engine from now on.

        Raises:
            RequestError: it records already (409), or the directory cannot be written.
        """
        await self._client.start_profile(options)

    async def stop_profile(self) -> str:
        """Write the trace of what was recorded; returns its file.

        Raises:
            RequestError: nothing is recorded (412).
        """
        return await self._client.stop_profile()

    async def loads(self) -> LoadSnapshot:
        """The load now."""
        self.stats = self._with_compiling(await self._client.load())
        return self.stats

    async def replica_loads(self) -> list[tuple[int, LoadSnapshot]]:
        """(replica, its load now) of the replicas that live."""
        loads = await self._client.loads()
        # The compiler is the front's; its grammars are shown with one replica, so that they are counted once.
        loads = [
            (replica, self._with_compiling(load) if not index else load) for index, (replica, load) in enumerate(loads)
        ]
        self.stats = merge_loads([load for _, load in loads])
        return loads

    def _with_compiling(self, load: LoadSnapshot) -> LoadSnapshot:
        if self._flow.grammars is None or not self._flow.grammars.num_waiting:
            return load
        return msgspec.structs.replace(load, num_compiling=self._flow.grammars.num_waiting)

    def look(self) -> bool:
        """Whether the core still says something; to be called every ``pulse.LOOK_SECONDS``.

        While it does not, new requests get a 503; after ``watchdog_timeout`` those in flight end with one. All goes on
        when the core does.
        """
        missed = self._client.look()
        was_silent, silent = self._flow.silent is not None, self._patience.is_quiet(missed)
        self._flow.silent = self._patience.describe(missed) if silent else None
        if silent and not was_silent:
            logger.error("the engine core does not answer; new requests are refused until it does")
        if was_silent and not silent:
            logger.info("the engine core answers again")
        if silent and self._patience.is_over(missed) and (ended := self._flow.give_up(self._patience.describe(missed))):
            logger.error("the engine core does not answer: ended %d requests", ended)
        return not silent

    async def pause(self, mode: str = "abort") -> None:
        """Stop generating and refuse new requests until ``resume``.

        Args:
            mode: "abort" ends what runs, "retract" frees its pages and runs it again later, "in_place" holds it.
        """
        checked = next((known for known in PAUSE_MODES if known == mode), None)
        if checked is None:
            raise RequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", field="mode")
        self._flow.send_unsent()
        await to_the_end(self._pause(checked))

    async def _pause(self, mode: PauseMode) -> None:
        async with self._pausing:
            paused, self._flow.paused = self._flow.paused, True
            try:
                await self._client.pause(mode)
            except RequestError:
                self._flow.paused = paused
                raise

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await to_the_end(self._resume())

    async def _resume(self) -> None:
        async with self._pausing:
            await self._client.resume()
            self._flow.paused = False

    def take_output(self, columns: OutputColumns) -> None:
        """Called by the client with the rows of a step."""
        self._flow.take_output(columns)

    def take_load(self, snapshot: LoadSnapshot) -> None:
        """Called by the client with a load report."""
        self.stats = snapshot

    def lose_core(self, reason: str) -> None:
        """Called by the client when the core is gone."""
        self._flow.fail_all(reason, 500)

    def lose_requests(self, keys: Sequence[int], reason: str, status: int) -> None:
        """Called by the client when the replica that had these requests is gone or silent."""
        self._flow.fail(keys, reason, status)


def _read_text_side(config: ServerConfig) -> tuple[ModelDescription, Tokenizer | None]:
    """What the front needs of the model's files."""
    description = read_description(str(config.model_path), config.json_model_override_args)
    tokenizer = None if config.skip_tokenizer_init else Tokenizer.load(config.effective_tokenizer_path)
    return description, tokenizer
