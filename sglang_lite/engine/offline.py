"""Engine: generation in this process, without a server, a socket or a second process.

The core is stepped in the thread that waits for a result. Several threads may call the engine at once: whoever steps
does so for all of them, and their requests run in one batch.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from sglang_lite import startup
from sglang_lite.config import ServerConfig
from sglang_lite.engine.adapter_registry import AdapterRegistry, LoadedAdapter
from sglang_lite.engine.batching import Submission, build_columns
from sglang_lite.engine.build import build_core_parts
from sglang_lite.engine.grammar_front import grammar_compiler, require_compiler
from sglang_lite.engine.info import EngineInfo, LoadSnapshot
from sglang_lite.engine.limits import PreparedPrompt, prepare_prompt
from sglang_lite.engine.messages import (
    Flush,
    Load,
    LoadAdapter,
    LoadGrammar,
    QueryLoad,
    Reply,
    UnloadAdapter,
)
from sglang_lite.engine.offline_requests import CallOptions, SamplingInput, build_requests
from sglang_lite.engine.parts import Build, CoreParts
from sglang_lite.engine.result import ResultOptions, generation_result, result_options
from sglang_lite.engine.roles import Role
from sglang_lite.engine.stepping import SteppedCore
from sglang_lite.frontend.output import OutputProcessor, SequenceState
from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.models.adapter_settings import NamedAdapter, adapter_settings
from sglang_lite.types import RequestColumns, RequestError, StartupError

Result = dict[str, Any]
_Call = tuple[GenerateRequest, PreparedPrompt]


@dataclass(slots=True)
class _Sequence:
    """One sequence of a call and how it is shown."""

    request: GenerateRequest
    state: SequenceState
    options: ResultOptions
    adapter: LoadedAdapter | None = None


class Engine:
    """A language model in this process.

    >>> with Engine(model_path="demo", device="cpu") as engine:
    ...     engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 8})["text"]

    Args:
        config: options of the server; else they are given one by one as keywords (``model_path="..."``).

    Raises:
        StartupError: the configuration cannot be served.
    """

    _is_paired = False
    """The class makes a partner for a core with a role."""

    def __init__(self, config: ServerConfig | None = None, *, build: Build = build_core_parts, **options: Any) -> None:
        given = config if config is not None else ServerConfig(**options)
        if config is not None and options:
            given = config.resolved(**options)
        _check_in_process(given, self._is_paired)
        self.config = startup.prepare(given)
        self.tokenizer: Tokenizer | None = None
        if not self.config.skip_tokenizer_init:
            self.tokenizer = Tokenizer.load(self.config.effective_tokenizer_path)
        parts = build(self.config, lambda message, fraction: None)
        self.info: EngineInfo = parts.info
        self._executor = parts.executor
        self._processor = OutputProcessor(self.tokenizer, stream_interval=self.config.stream_interval)
        self._role = self._make_role(parts)
        self._stepped = SteppedCore(parts, self._role, self._processor)
        self._core = self._stepped.core
        self.adapters = AdapterRegistry(adapter_settings(self.config))
        self._compiler = grammar_compiler(self.config, self.tokenizer, self.info.vocab_size, self.info.eos_token_ids)
        self._counting = threading.Lock()
        self._keys = itertools.count(1)
        self._calls = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingInput = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        token_ids_logprob: Sequence[int] | None = None,
        return_text_in_logprobs: bool = False,
        lora_path: str | Sequence[str | None] | None = None,
        stream: bool = False,
    ) -> Any:
        """Generate from one prompt or many.

        Args:
            prompt: a text or a list of texts.
            sampling_params: SGLang's sampling parameters: one mapping for all prompts, or one for each.
            input_ids: token ids instead of ``prompt``: one list or a list of lists.
            lora_path: name of a loaded adapter for all prompts, or one (or None) for each.
            stream: return an iterator of cumulative results instead; for a batch each has an ``index``. The input is
                checked at once, and the sequences run from the first result that is asked for.

        Returns:
            ``{"text", "output_ids", "meta_info"}``, or a list of them for a batch or ``n`` > 1 (prompt-major).

        Raises:
            RequestError: bad input; nothing of the call runs then.
        """
        self._stepped.check_open()
        options = CallOptions(
            vocab_size=self.info.vocab_size,
            sampling=sampling_params,
            defaults=self.config.preferred_sampling_params or {},
            stream=stream,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            token_ids_logprob=tuple(token_ids_logprob or ()),
            lora_path=lora_path,
        )
        requests, is_batch = build_requests(prompt, input_ids, options)
        calls = [(request, self._prepare(request)) for request in requests]
        if stream:
            return self._stream(calls, return_text_in_logprobs, is_batch)
        results = self._collect(self._submit(calls, return_text_in_logprobs))
        return results if is_batch else results[0]

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> None:
        """Load a low-rank adapter that requests may use from then on as ``lora_path=lora_name``.

        Args:
            lora_path: directory with adapter_config.json and adapter_model.safetensors.

        Raises:
            RequestError: the name is taken, there is no room, or the adapter cannot be used.
        """
        self._stepped.check_open()
        with self._counting:
            adapter = self.adapters.reserve(NamedAdapter(name=lora_name, path=lora_path))
        try:
            self._change_adapter(LoadAdapter(0, next(self._calls), adapter.slot, lora_path))
        except BaseException:
            self.adapters.forget(adapter)
            raise
        adapter.ready = True

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload a low-rank adapter.

        Raises:
            RequestError: there is no such adapter, or sequences that use it are still open.
        """
        self._stepped.check_open()
        with self._counting:
            adapter = self.adapters.retire(lora_name)
            if adapter.users:
                adapter.ready = True
                raise RequestError(
                    f"adapter {lora_name!r} is used by {adapter.users} open sequences; finish them first",
                    field="lora_name",
                )
        self._change_adapter(UnloadAdapter(0, next(self._calls), adapter.slot))
        self.adapters.forget(adapter)

    def _change_adapter(self, command: LoadAdapter | UnloadAdapter) -> None:
        reply = self._control(command)
        if isinstance(reply, Reply) and not reply.ok:
            raise RequestError(reply.message, field="lora_path")

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests run."""
        reply = self._control(Flush(0, next(self._calls), 0.0))
        return isinstance(reply, Reply) and reply.ok

    def load(self) -> LoadSnapshot:
        """Load and counters now."""
        reply = self._control(QueryLoad(0, next(self._calls)))
        return reply.snapshot if isinstance(reply, Load) else LoadSnapshot()

    def shutdown(self) -> None:
        """Free the model. Sequences still running are dropped. May be called twice."""
        self._stepped.close(self._end)

    def _end(self) -> None:
        self._close_core()
        if self._compiler is not None:
            self._compiler.close()

    def _close_core(self) -> None:
        self._executor.close()

    def _submit(self, calls: Sequence[_Call], with_token_text: bool) -> list[_Sequence]:
        """Admit the sequences of a call together."""
        token_text = self.tokenizer.token_text if with_token_text and self.tokenizer is not None else None
        grammars = [self._load_grammar(request) for request, _ in calls]
        sequences: list[_Sequence] = []
        try:
            for request, prompt in calls:
                options = result_options(
                    request,
                    with_text=self.tokenizer is not None,
                    token_text=token_text,
                    weight_version=self.config.weight_version,
                )
                state = self._processor.add(next(self._keys), request, len(prompt.token_ids), time.time())
                sequences.append(_Sequence(request, state, options))
                if request.adapter is not None:
                    with self._counting:
                        sequences[-1].adapter = self.adapters.acquire(request.adapter)
            submissions = [
                Submission(sequence.state.key, request, prompt, sequence.adapter, grammar)
                for sequence, (request, prompt), grammar in zip(sequences, calls, grammars, strict=True)
            ]
            columns = build_columns(submissions)
        except (RequestError, OverflowError, TypeError, ValueError):
            self._forget(sequences)
            raise
        self._admit(columns)
        return sequences

    def _make_role(self, parts: CoreParts) -> Role | None:
        """The role of the core under prefill/decode disaggregation."""
        del parts
        return None

    def _admit(self, columns: RequestColumns) -> None:
        self._stepped.transport.put(columns)

    def _prepare(self, request: GenerateRequest) -> PreparedPrompt:
        token_ids = request.input_ids
        if token_ids is None:
            if self.tokenizer is None:
                raise RequestError("the engine has no tokenizer (skip_tokenizer_init): pass input_ids", field="prompt")
            token_ids = self.tokenizer.encode(request.text or "", add_special_tokens=request.add_special_tokens)
        return prepare_prompt(request, token_ids, self.info, allow_auto_truncate=self.config.allow_auto_truncate)

    def _load_grammar(self, request: GenerateRequest) -> str:
        """The name of the request's grammar, which the core has by then; empty without one."""
        grammar = request.sampling.grammar
        if grammar is None:
            return ""
        ignore_eos = request.sampling.ignore_eos
        compiler = require_compiler(
            self._compiler, grammar, self.config, self.info.eos_token_ids, ignore_eos=ignore_eos
        )
        compiled = compiler.submit(grammar).result().checked()
        reply = self._control(LoadGrammar(0, next(self._calls), compiled.identity, compiled.compiled))
        if isinstance(reply, Reply) and not reply.ok:
            raise RequestError(f"the engine cannot load the grammar: {reply.message}", status=503)
        return compiled.identity

    def _collect(self, sequences: Sequence[_Sequence]) -> list[Result]:
        try:
            states = [sequence.state for sequence in sequences]
            while any(state.finish_reason is None for state in states):
                self._stepped.turn(states)
            outputs = [self._processor.snapshot(sequence.state) for sequence in sequences]
        finally:
            self._release(sequences)
        for output in outputs:
            _raise_if_failed(output)
        pairs = zip(outputs, sequences, strict=True)
        return [generation_result(output, sequence.options) for output, sequence in pairs]

    def _stream(self, calls: Sequence[_Call], with_token_text: bool, is_batch: bool) -> Iterator[Result]:
        """Cumulative results as they come. Closing the iterator aborts what still runs.

        Nothing is admitted before the first result is asked for: an iterator that nobody starts owns nothing.
        """
        self._stepped.check_open()
        sequences = self._submit(calls, with_token_text)
        open_indices = set(range(len(sequences)))
        try:
            while open_indices:
                self._stepped.turn([sequences[index].state for index in open_indices])
                for index in sorted(open_indices):
                    sequence = sequences[index]
                    if sequence.state.key not in self._stepped.news:
                        continue
                    self._stepped.news.discard(sequence.state.key)
                    output = self._processor.snapshot(sequence.state)
                    _raise_if_failed(output)
                    if output.finish_reason is not None:
                        open_indices.discard(index)
                    result = generation_result(output, sequence.options)
                    yield {**result, "index": index} if is_batch else result
        finally:
            self._release(sequences)

    def _control(self, command: Flush | QueryLoad | LoadAdapter | UnloadAdapter | LoadGrammar) -> Reply | Load:
        return self._stepped.ask(command)

    def _release(self, sequences: Sequence[_Sequence]) -> None:
        running = [s.state.key for s in sequences if s.state.finish_reason is None]
        self._stepped.give_up(running, lambda: self._forget(sequences))

    def _forget(self, sequences: Sequence[_Sequence]) -> None:
        for sequence in sequences:
            self._processor.remove(sequence.state.key)
            self._stepped.news.discard(sequence.state.key)
            if sequence.adapter is not None:
                with self._counting:
                    self.adapters.release(sequence.adapter)
                sequence.adapter = None


def _check_in_process(config: ServerConfig, is_paired: bool) -> None:
    """Raises StartupError for options that need more than one process."""
    if config.dp_size > 1 or config.nnodes > 1:
        raise StartupError(
            f"--dp-size {config.dp_size} and --nnodes {config.nnodes} must be 1 for an engine in this process: "
            f"use AsyncEngine or a server"
        )
    if config.kv_events_config is not None:
        raise StartupError("--kv-events-config: an engine in this process publishes none; use AsyncEngine or a server")
    if config.is_disaggregated and not is_paired:
        raise StartupError(
            f"--disaggregation-mode {config.disaggregation_mode}: an engine in this process has no partner; use "
            f"DisaggregatedEngine, which is both, or servers"
        )


def _raise_if_failed(output: GenerationOutput) -> None:
    reason = output.finish_reason
    if reason is not None and reason.type == "abort":
        raise RequestError(reason.message or "the request was aborted", status=reason.status_code or 500)
