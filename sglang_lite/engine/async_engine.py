"""AsyncEngine: generation as asynchronous iterators over an engine core in its own process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from sglang_lite import startup
from sglang_lite.config import ServerConfig
from sglang_lite.engine.adapter_registry import AdapterRegistry, LoadedAdapter
from sglang_lite.engine.batching import Submission, build_columns
from sglang_lite.engine.client import FRONT, EngineClient, EngineDeadError
from sglang_lite.engine.grammar_front import GrammarFront, grammar_compiler, require_compiler
from sglang_lite.engine.info import EngineInfo, LoadSnapshot
from sglang_lite.engine.launcher import CORE_COMMAND
from sglang_lite.engine.limits import prepare_prompt
from sglang_lite.engine.messages import PauseMode
from sglang_lite.engine.reader import RequestReader
from sglang_lite.engine.replicas import ReplicaClient, merge_loads
from sglang_lite.engine.tokenization import TokenizationPool
from sglang_lite.engine.transport import FRONT_SHIFT
from sglang_lite.frontend.output import OutputProcessor, SequenceState, abort_reason
from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.models.adapter_settings import NamedAdapter, adapter_settings
from sglang_lite.models.description import ModelDescription, read_description
from sglang_lite.types import OutputColumns, ProfileOptions, RequestError

logger = logging.getLogger(__name__)

PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")

REFUSING_STATUSES = (400, 429)
"""An engine that ends a request with one of these before any output has refused it."""

Progress = Callable[[str, float], None]


@dataclass(slots=True, eq=False)
class _LiveRequest:
    """A request between ``generate`` and its end; ``state`` is None until it is tokenized and its grammar compiled."""

    request: GenerateRequest
    state: SequenceState | None = None
    aborted: bool = False
    adapter: LoadedAdapter | None = None
    compiling: asyncio.Task[str] | None = None

    def was_aborted(self) -> bool:
        """``aborted`` as it is now: it changes while others run."""
        return self.aborted


class AsyncEngine:
    """Serves requests of one event loop. Made by ``start``; ``async with`` closes it.

    Attributes:
        config: as prepared for serving (local paths, decided policy).
        info: facts of the engine core.
        tokenizer: None with ``skip_tokenizer_init``.
        description: the model as its files describe it.
        stats: the newest load report, about one second old while the engine works.
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
    ) -> None:
        self.config = config
        self.description = description
        self.tokenizer = tokenizer
        self.stats = LoadSnapshot()
        self.info = info
        self._client = client
        self._pool = TokenizationPool(tokenizer) if tokenizer is not None else None
        self._processor = OutputProcessor(tokenizer, stream_interval=config.stream_interval)
        self.adapters = AdapterRegistry(adapter_settings(config))
        compiler = grammar_compiler(config, tokenizer, info.vocab_size, info.eos_token_ids)
        self._compiler = compiler
        self._grammars = None if compiler is None else GrammarFront(compiler, client.load_grammar)
        self._live: dict[str, _LiveRequest] = {}
        self._unsent: list[Submission] = []
        self._keys = itertools.count((front << FRONT_SHIFT) + 1)
        self._paused = False

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
            fronts = config.tokenizer_worker_num
            start = client.start(config.to_json(), timeout=timeout, command=command, fronts=fronts)
        else:
            client = ReplicaClient(config, progress)
            start = client.start(config.to_json(), timeout=timeout, command=command)
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
        engine = cls(config, description, tokenizer, client, info)
        client.listen(engine)
        return engine

    @classmethod
    async def attach(cls, config: ServerConfig, info: EngineInfo, directory: str, front: int) -> Self:
        """Use the core of another front process.

        Args:
            config: as that front has prepared it; info: what its core said of itself.
            directory: ``directory`` of that front's engine.
            front: number of this front, from 1 to ``tokenizer_worker_num`` - 1, used by no other.
        """
        description, tokenizer = await asyncio.to_thread(_read_text_side, config)
        client = EngineClient(front=front)
        client.attach(directory)
        engine = cls(config, description, tokenizer, client, info, front=front)
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
    def directory(self) -> str | None:
        """Private directory of the sockets of an only core that this front has started, else None."""
        return self._client.directory if isinstance(self._client, EngineClient) else None

    @property
    def num_live(self) -> int:
        """Requests whose iterators are still open."""
        return len(self._live)

    async def close(self, grace: float = 5.0) -> None:
        """End the core. Requests still running end with an abort."""
        self._end_all("the engine was shut down", 503)
        await self._client.close(grace)
        if self._pool is not None:
            self._pool.close()
        if self._grammars is not None:
            await asyncio.to_thread(self._grammars.close)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationOutput, None]:
        """Generate one sequence.

        Yields cumulative snapshots; the last one has a finish reason. A reader that is slower than the engine gets
        fewer, larger steps. Without ``request.stream`` there is one snapshot, at the end. Leaving the iterator early
        aborts the request.

        Raises:
            RequestError: before the first snapshot: bad input, a duplicate id, a full queue, a paused or dead engine.
        """
        self._check_serving()
        live = self._register(request)
        try:
            if request.adapter is not None:
                live.adapter = self.adapters.acquire(request.adapter)
            arrived = time.time()
            token_ids = await self._token_ids(request)
            tokenized = time.time()
            grammar = await self._grammar(live)
            self._check_serving()
            state = live.state = self._submit(live, token_ids, grammar)
            waited = {"tokenization": tokenized - arrived, "grammar": state.received_at - tokenized}
            state.preparation = waited
            reader: RequestReader = state.waiter
            while True:
                await reader.wait()
                output = self._processor.snapshot(state)
                _raise_if_refused(output)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._release(live)

    def abort(self, request_id: str) -> bool:
        """Abort the requests whose id starts with ``request_id``; whether there was one."""
        found = [
            live
            for name, live in self._live.items()
            if request_id and name.startswith(request_id) and not (live.state and live.state.finish_reason)
        ]
        for live in found:
            self._mark_aborted(live)
        self._abort_keys([live.state.key for live in found if live.state is not None])
        return bool(found)

    async def abort_all(self) -> int:
        """Abort everything the core has; returns how many requests that was."""
        for live in self._live.values():
            self._mark_aborted(live)
        self._send_unsent()
        return await self._client.abort_all()

    async def flush_cache(self, timeout: float = 0.0) -> bool:
        """Empty the prefix cache; False when requests are still there after ``timeout`` seconds."""
        self._send_unsent()
        if self._grammars is not None:
            self._grammars.clear()
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
        self._check_serving()
        adapter = self.adapters.reserve(NamedAdapter(name=name, path=path, pinned=pinned))
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
        adapter = self.adapters.retire(name)
        try:
            await adapter.unused.wait()
            self._send_unsent()
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
        self._send_unsent()
        await self._client.update_weights(path)

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
        if self._grammars is None or not self._grammars.num_waiting:
            return load
        return msgspec.structs.replace(load, num_compiling=self._grammars.num_waiting)

    async def ping(self, timeout: float) -> None:
        """Return when the core's loop has answered.

        Raises:
            RequestError: 503, it did not within ``timeout`` seconds.
        """
        await self._client.ping(timeout)

    async def pause(self, mode: str = "abort") -> None:
        """Stop generating and refuse new requests until ``resume``.

        Args:
            mode: "abort" ends what runs, "retract" frees its pages and runs it again later, "in_place" holds it.
        """
        checked = next((known for known in PAUSE_MODES if known == mode), None)
        if checked is None:
            raise RequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", field="mode")
        self._send_unsent()
        paused, self._paused = self._paused, True
        try:
            await self._client.pause(checked)
        except RequestError:
            self._paused = paused
            raise

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self._client.resume()
        self._paused = False

    def _check_serving(self) -> None:
        if self._client.failure is not None:
            raise EngineDeadError(self._client.failure)
        if self._paused:
            raise RequestError("generation is paused; continue it first", status=412)

    def _register(self, request: GenerateRequest) -> _LiveRequest:
        if request.request_id in self._live:
            raise RequestError(f"Duplicate request ID detected: {request.request_id}", field="rid")
        live = self._live[request.request_id] = _LiveRequest(request)
        return live

    async def _token_ids(self, request: GenerateRequest) -> Sequence[int]:
        if request.input_ids is not None:
            return request.input_ids
        if request.text is None:
            raise RequestError("Either text, input_ids or input_embeds should be provided.", field="text")
        if self._pool is None:
            raise RequestError("the server has no tokenizer (--skip-tokenizer-init): send input_ids", field="text")
        return await self._pool.encode(request.text, add_special_tokens=request.add_special_tokens)

    async def _grammar(self, live: _LiveRequest) -> str:
        """The name of the request's grammar once the engine has it; empty without one, and after an abort."""
        grammar, sampling = live.request.sampling.grammar, live.request.sampling
        if grammar is None:
            return ""
        require_compiler(self._compiler, grammar, self.config, self.info.eos_token_ids, ignore_eos=sampling.ignore_eos)
        if self._grammars is None or live.was_aborted():
            return ""
        live.compiling = asyncio.create_task(self._grammars.ready(grammar))
        try:
            return await live.compiling
        except asyncio.CancelledError:
            if live.was_aborted() and live.compiling.cancelled():
                return ""
            live.compiling.cancel()
            raise

    @staticmethod
    def _mark_aborted(live: _LiveRequest) -> None:
        live.aborted = True
        if live.compiling is not None:
            live.compiling.cancel()

    def _submit(self, live: _LiveRequest, token_ids: Sequence[int], grammar: str) -> SequenceState:
        """Check the request and put it into the frame of this turn of the event loop."""
        request = live.request
        prompt = prepare_prompt(request, token_ids, self.info, allow_auto_truncate=self.config.allow_auto_truncate)
        key = next(self._keys)
        state = self._processor.add(key, request, len(prompt.token_ids), time.time())
        state.waiter = RequestReader()
        if live.aborted:
            state.finish_reason = abort_reason("Abort in waiting queue")
            state.waiter.notify()
            return state
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_unsent)
        self._unsent.append(Submission(key, request, prompt, live.adapter, grammar))
        return state

    def _send_unsent(self) -> None:
        """One ingress frame for everything that has come in since the last one."""
        submissions, self._unsent = self._unsent, []
        if not submissions:
            return
        try:
            wanted = [submission.request.replica for submission in submissions]
            self._client.submit(build_columns(submissions), wanted)
        except (OverflowError, TypeError, ValueError) as error:
            if len(submissions) == 1:
                self._refuse(submissions[0], f"the request cannot be sent to the engine: {error}")
                return
            # A value that its column cannot hold must cost the others nothing.
            for submission in submissions:
                self._unsent = [submission]
                self._send_unsent()

    def _refuse(self, submission: Submission, message: str) -> None:
        state = self._processor.get(submission.key)
        if state is not None and state.finish_reason is None:
            state.finish_reason = abort_reason(message, 400)
            state.finished_at = time.time()
            _notify([state])

    def _abort_keys(self, keys: list[int]) -> None:
        if keys:
            self._send_unsent()
            self._client.abort_nowait(keys)

    def _release(self, live: _LiveRequest) -> None:
        """The reader is done with a request, or has gone away."""
        del self._live[live.request.request_id]
        state = live.state
        if state is not None:
            self._processor.remove(state.key)
            if state.finish_reason is None:
                self._abort_keys([state.key])
        if live.adapter is not None:
            # After the abort: whoever waits to unload the adapter sends that behind it.
            self.adapters.release(live.adapter)

    def take_output(self, columns: OutputColumns) -> None:
        """Called by the client with the rows of a step."""
        processed = self._processor.process(columns, time.time())
        if processed.finish_keys:
            self._client.finish(processed.finish_keys)
        _notify(processed.changed)

    def take_load(self, snapshot: LoadSnapshot) -> None:
        """Called by the client with a load report."""
        self.stats = snapshot

    def lose_core(self, reason: str) -> None:
        """Called by the client when the core is gone."""
        self._end_all(reason, 500)

    def lose_requests(self, keys: Sequence[int], reason: str) -> None:
        """Called by the client when the replica that had these requests is gone."""
        _notify(self._processor.fail(keys, reason, 500, time.time()))

    def _end_all(self, reason: str, status: int) -> None:
        _notify(self._processor.fail_all(reason, status, time.time()))


def _read_text_side(config: ServerConfig) -> tuple[ModelDescription, Tokenizer | None]:
    """What the front needs of the model's files."""
    description = read_description(str(config.model_path), config.json_model_override_args)
    tokenizer = None if config.skip_tokenizer_init else Tokenizer.load(config.effective_tokenizer_path)
    return description, tokenizer


def _notify(states: Sequence[SequenceState]) -> None:
    for state in states:
        waiter: Any = state.waiter
        if waiter is not None:
            waiter.notify()


def _raise_if_refused(output: GenerationOutput) -> None:
    """A request that the engine refused never ran: that is an error of the call, not a result."""
    reason = output.finish_reason
    if reason is None or reason.type != "abort" or output.output_ids or reason.status_code not in REFUSING_STATUSES:
        return
    raise RequestError(reason.message or "the request was refused", status=reason.status_code)
