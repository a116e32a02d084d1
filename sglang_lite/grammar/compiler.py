"""The front's compiler of grammars: threads that wait for compiler processes, and a cache by content."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from sglang_lite.grammar.backends import check_text, identity
from sglang_lite.grammar.base import GrammarError, Vocabulary
from sglang_lite.grammar.process import CompilerError, CompilerProcess
from sglang_lite.types import Grammar, RequestError

PROCESSES = 2
"""Compiler processes, each started when the others are busy: one slow grammar does not hold up all others."""

COMPILE_SECONDS = 20.0
"""Longest time for one grammar."""

MAX_WAITING = 64
"""Grammars that may wait for a compiler."""

CACHE_ENTRIES = 512
CACHE_BYTES = 256 << 20

NO_BACKEND = (
    "Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported when the server is launched "
    "with --grammar-backend none"
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar's name and compiled form, or why there is none.

    Kept and shared, so an error is a text here: an exception would grow with every time that it is raised.
    """

    identity: str
    compiled: bytes = b""
    error: str = ""
    status: int = 200
    field: str = ""

    def checked(self) -> Compiled:
        """Itself.

        Raises:
            RequestError: it could not be compiled.
        """
        if self.error:
            raise RequestError(self.error, status=self.status, field=self.field)
        return self


class GrammarCompiler:
    """Compiles grammars off the calling thread; requests with the same new grammar share one compilation.

    What cannot be compiled is remembered as well, so that a repeat fails at once.

    Args:
        backend: name of the library.
        vocabulary: called once, in a thread, at the first grammar.
    """

    def __init__(self, backend: str, vocabulary: Callable[[], Vocabulary], *, seconds: float = COMPILE_SECONDS) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Future[Compiled]] = OrderedDict()
        self._waiting = 0
        self._threads: ThreadPoolExecutor | None = None
        self._processes: list[CompilerProcess] = []
        self._idle: SimpleQueue[CompilerProcess] = SimpleQueue()
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Grammars being compiled or waiting for that."""
        return self._waiting

    def submit(self, grammar: Grammar) -> Future[Compiled]:
        """The compiled form, or why there is none.

        Raises:
            RequestError: 400, the grammar is too long or malformed; 429, too many wait.
        """
        check_text(grammar)
        name = identity(grammar)
        with self._lock:
            future = self._known.get(name)
            if future is not None:
                self._known.move_to_end(name)
                return future
            if self._waiting >= MAX_WAITING:
                raise RequestError(f"{self._waiting} grammars wait to be compiled; try again later", status=429)
            if self._closed:
                raise RequestError("the engine was shut down", status=503)
            if self._threads is None:
                self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="grammar")
            self._waiting += 1
            future = self._known[name] = Future()
            self._threads.submit(self._run, name, grammar, future)
        return future

    def clear(self) -> None:
        """Forget what was compiled."""
        with self._lock:
            for name in [name for name, future in self._known.items() if future.done()]:
                del self._known[name]

    def close(self) -> None:
        """End the processes; what is being compiled fails."""
        with self._lock:
            self._closed = True
            processes, threads = list(self._processes), self._threads
        for process in processes:
            process.close()
        if threads is not None:
            threads.shutdown(wait=True)

    def _run(self, name: str, grammar: Grammar, future: Future[Compiled]) -> None:
        kind = grammar.kind
        try:
            result = Compiled(name, self._compile(grammar))
        except GrammarError as error:
            result = Compiled(name, error=f"Failed to compile {kind} grammar: {error}", status=400, field=kind)
        except Exception as error:  # whoever waits for it must learn of it; it may work another time
            with self._lock:
                self._known.pop(name, None)
            known = isinstance(error, CompilerError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            result = Compiled(name, error=f"no grammar can be compiled: {text}", status=503, field=kind)
        with self._lock:
            self._waiting -= 1
        future.set_result(result)
        self._trim()

    def _compile(self, grammar: Grammar) -> bytes:
        process = self._take_process()
        try:
            return process.compile(grammar)
        finally:
            self._idle.put(process)

    def _take_process(self) -> CompilerProcess:
        """An idle process, or a new one; there are as many threads as processes, so one is always to be had."""
        with self._lock:
            if not self._idle.empty():
                return self._idle.get_nowait()
            if self._closed:
                raise CompilerError("the engine was shut down")
            if self._processes:
                vocabulary = self._processes[0].vocabulary
            else:
                vocabulary = self._vocabulary()
            process = CompilerProcess(self._backend, vocabulary, self._seconds)
            self._processes.append(process)
            return process

    def _trim(self) -> None:
        """Forget the oldest results beyond the limits."""
        with self._lock:
            done = {name: len(future.result().compiled) for name, future in self._known.items() if future.done()}
            size = sum(done.values())
            for name, compiled in done.items():
                if len(self._known) <= CACHE_ENTRIES and size <= CACHE_BYTES:
                    return
                del self._known[name]
                size -= compiled
