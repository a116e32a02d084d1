"""The way of requests through a front: checked, tokenized, sent to the core, read back, and forgotten."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_lite.config import ServerConfig
from sglang_lite.engine.adapter_registry import AdapterRegistry, LoadedAdapter
from sglang_lite.engine.batching import Submission, build_columns
from sglang_lite.engine.client import EngineClient
from sglang_lite.engine.control_calls import EngineDeadError
from sglang_lite.engine.grammar_front import GrammarFront, grammar_compiler, require_compiler
from sglang_lite.engine.info import EngineInfo
from sglang_lite.engine.limits import prepare_prompt
from sglang_lite.engine.reader import RequestReader
from sglang_lite.engine.refusals import raise_if_refused, refusal
from sglang_lite.engine.replicas import ReplicaClient
from sglang_lite.engine.shared_claims import SharedClaims
from sglang_lite.engine.tokenization import TokenizationPool
from sglang_lite.engine.transport import FRONT_SHIFT
from sglang_lite.frontend.output import OutputProcessor, SequenceState, abort_reason
from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.types import OutputColumns, RequestError


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


class RequestFlow:
    """The requests of one front.

    Attributes:
        processor: assembles the output of each.
        grammars: compiles the grammars of requests; None where the server has no compiler.
        silent: why new requests are refused while the core says nothing; None when it does.
        paused: refuse new requests until it is false again.
        released: memory that the engine has given back; requests are refused until there is none.
    """

    def __init__(
        self,
        config: ServerConfig,
        tokenizer: Tokenizer | None,
        client: EngineClient | ReplicaClient,
        info: EngineInfo,
        adapters: AdapterRegistry,
        *,
        front: int,
        claims: SharedClaims | None = None,
    ) -> None:
        self._config = config
        self._client = client
        self._info = info
        self._adapters = adapters
        self._pool = TokenizationPool(tokenizer) if tokenizer is not None else None
        self.processor = OutputProcessor(tokenizer, stream_interval=config.stream_interval)
        self._compiler = grammar_compiler(config, tokenizer, info.vocab_size, info.eos_token_ids)
        self.grammars = (
            None
            if self._compiler is None
            else GrammarFront(self._compiler, client.load_grammar, config.tokenizer_worker_num)
        )
        self._live: dict[str, _LiveRequest] = {}
        self._claims = claims
        self._unsent: list[Submission] = []
        self._keys = itertools.count((front << FRONT_SHIFT) + 1)
        self.silent: str | None = None
        self.paused = False
        self.released: frozenset[str] = frozenset()

    @property
    def num_live(self) -> int:
        """Requests whose iterators are still open."""
        return len(self._live)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationOutput, None]:
        """See ``AsyncEngine.generate``."""
        try:
            self.check_serving()
            live = self._register(request)
        except RequestError:
            self._tell_partner(request)
            raise
        try:
            if request.adapter is not None:
                live.adapter = self._adapters.acquire(request.adapter)
            arrived = time.time()
            token_ids = await self._token_ids(request)
            tokenized = time.time()
            grammar = await self._grammar(live)
            self.check_serving()
            state = live.state = self._submit(live, token_ids, grammar)
            waited = {"tokenization": tokenized - arrived, "grammar": state.received_at - tokenized}
            state.preparation = waited
            for output in self.processor.repeated(state):
                yield output
            reader: RequestReader = state.waiter
            while True:
                await reader.wait()
                output = self.processor.snapshot(state)
                raise_if_refused(output)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if live.state is None:
                self._tell_partner(request)
            self._release(live)

    def abort(self, request_id: str, *, exact: bool = False) -> bool:
        """Abort the requests whose id starts with ``request_id``, or is just that; whether there was one."""
        found = [
            live
            for name, live in self._live.items()
            if request_id
            and (name == request_id if exact else name.startswith(request_id))
            and not (live.state and live.state.finish_reason)
        ]
        for live in found:
            self._mark_aborted(live)
        self._abort_keys([live.state.key for live in found if live.state is not None])
        return bool(found)

    def mark_all_aborted(self) -> None:
        """Keep what is being prepared from the core, and send what is ready, so that an abort meets it."""
        for live in self._live.values():
            self._mark_aborted(live)
        self.send_unsent()

    def check_serving(self) -> None:
        """Return when requests can be taken.

        Raises:
            RequestError: the engine is gone or silent (503), paused, or without its memory (412).
        """
        if self._client.failure is not None:
            raise EngineDeadError(self._client.failure)
        if self.silent is not None:
            raise EngineDeadError(self.silent)
        if self.paused:
            raise RequestError("generation is paused; continue it first", status=412)
        if self.released:
            names = ", ".join(sorted(self.released))
            raise RequestError(f"memory is released ({names}); call /resume_memory_occupation first", status=412)

    def _register(self, request: GenerateRequest) -> _LiveRequest:
        name = request.request_id
        if name in self._live or (self._claims is not None and not self._claims.claim(name)):
            raise RequestError(f"Duplicate request ID detected: {name}", field="rid")
        live = self._live[name] = _LiveRequest(request)
        return live

    async def _token_ids(self, request: GenerateRequest) -> Sequence[int]:
        if (known := request.known_ids) is not None:
            return known
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
        require_compiler(
            self._compiler, grammar, self._config, self._info.eos_token_ids, ignore_eos=sampling.ignore_eos
        )
        if self.grammars is None or live.was_aborted():
            return ""
        live.compiling = asyncio.create_task(self.grammars.ready(grammar))
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
        prompt = prepare_prompt(request, token_ids, self._info, allow_auto_truncate=self._config.allow_auto_truncate)
        key = next(self._keys)
        state = self.processor.add(key, request, prompt.num_prompt, time.time())
        state.waiter = RequestReader()
        if live.aborted:
            state.finish_reason = abort_reason("Abort in waiting queue")
            state.waiter.notify()
            self._tell_partner(request)
            return state
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self.send_unsent)
        self._unsent.append(Submission(key, request, prompt, live.adapter, grammar))
        return state

    def send_unsent(self) -> None:
        """One ingress frame for everything that has come in since the last one."""
        submissions, self._unsent = self._unsent, []
        if not submissions:
            return
        try:
            wanted = [self._client.wanted_replica(submission.request) for submission in submissions]
            self._client.submit(build_columns(submissions), wanted)
        except (OverflowError, TypeError, ValueError) as error:
            if len(submissions) == 1:
                self._refuse(submissions[0], f"the request cannot be sent to the engine: {error}")
                return
            # A value that its column cannot hold must cost the others nothing.
            for submission in submissions:
                self._unsent = [submission]
                self.send_unsent()

    def _refuse(self, submission: Submission, message: str) -> None:
        state = self.processor.get(submission.key)
        if state is not None and state.finish_reason is None:
            state.finish_reason = abort_reason(message, 400)
            state.finished_at = time.time()
            _notify([state])

    def _tell_partner(self, request: GenerateRequest) -> None:
        """The core will not get this request: its pair, if it is one of two, must not wait for it."""
        if request.transfer is not None and self._client.failure is None:
            self._client.submit(refusal(next(self._keys), request), [self._client.wanted_replica(request)])

    def _abort_keys(self, keys: list[int]) -> None:
        if keys:
            self.send_unsent()
            self._client.abort_nowait(keys)

    def _release(self, live: _LiveRequest) -> None:
        """The reader is done with a request, or has gone away."""
        del self._live[live.request.request_id]
        if self._claims is not None:
            self._claims.release(live.request.request_id)
        state = live.state
        if state is not None:
            self.processor.remove(state.key)
            if state.finish_reason is None:
                self._abort_keys([state.key])
        if live.adapter is not None:
            # After the abort: whoever waits to unload the adapter sends that behind it.
            self._adapters.release(live.adapter)

    def take_output(self, columns: OutputColumns) -> None:
        """Called by the client with the rows of a step."""
        processed = self.processor.process(columns, time.time())
        if processed.finish_keys:
            self._client.finish(processed.finish_keys)
        _notify(processed.changed)

    def fail(self, keys: Sequence[int], reason: str, status: int) -> None:
        """End these requests with an abort."""
        _notify(self.processor.fail(keys, reason, status, time.time()))

    def fail_all(self, reason: str, status: int) -> None:
        """End all requests with an abort."""
        _notify(self.processor.fail_all(reason, status, time.time()))

    def give_up(self, reason: str) -> int:
        """End the requests that a silent core has, with a 503; it is told, for when it goes on. Returns how many."""
        running = self.processor.fail_all(reason, 503, time.time())
        self._abort_keys([state.key for state in running])
        _notify(running)
        for live in self._live.values():
            if live.state is None and live.compiling is not None:
                self._mark_aborted(live)  # it waits for the core to load its grammar, and then hears why it is refused
        return len(running)

    async def close(self) -> None:
        """End the threads and the compiler."""
        if self._pool is not None:
            self._pool.close()
        if self.grammars is not None:
            await asyncio.to_thread(self.grammars.close)


def _notify(states: Sequence[SequenceState]) -> None:
    for state in states:
        waiter: Any = state.waiter
        if waiter is not None:
            waiter.notify()
