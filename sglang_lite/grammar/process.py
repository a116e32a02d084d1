"""The front's side of a compiler process: starts it when it is needed, and ends it when it takes too long."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time

from sglang_lite.grammar.base import GrammarError, Vocabulary
from sglang_lite.grammar.limits import HOW_TO_SHRINK, TOO_LARGE
from sglang_lite.grammar.messages import LENGTH, Answer, Compile, Setup, decode_answer, encode
from sglang_lite.types import Grammar

START_SECONDS = 120.0
"""The libraries may take a while to load on a busy machine."""

MEMORY_BYTES = 2 << 30
"""What a compilation may use."""

_EXIT_SECONDS = 1.0
"""How long a process whose output has ended may take to leave."""

MAX_COMPILED_BYTES = 64 << 20
"""Largest compiled form: it is kept, and sent to the engine."""


class CompilerError(Exception):
    """The process cannot be started or its library is missing; no fault of a grammar."""


class CompilerProcess:
    """Compiles one grammar at a time. Any thread may call it; ``close`` from another one ends a compilation.

    Args:
        backend: name of the library.
        seconds: longest time for one grammar.

    Attributes:
        vocabulary: what it compiles for.
    """

    def __init__(self, backend: str, vocabulary: Vocabulary, seconds: float) -> None:
        tokens, size, end_ids = vocabulary.tokens, vocabulary.size, vocabulary.end_ids
        self._setup = Setup(backend, MEMORY_BYTES, tokens, size, end_ids, vocabulary.markers)
        self.vocabulary = vocabulary
        self._seconds = seconds
        self._busy = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def compile(self, grammar: Grammar) -> bytes:
        """The compiled form.

        Raises:
            GrammarError: the library refuses it, or it takes too much time or memory.
            CompilerError: there is no compiler.
        """
        with self._busy:
            process = self._started()
            try:
                answer = self._ask(process, encode(Compile(grammar)), self._seconds)
            except TimeoutError:
                self._end()
                raise GrammarError(
                    f"{TOO_LARGE}: compiling it takes more than {self._seconds:g} seconds; {HOW_TO_SHRINK}"
                ) from None
            except EOFError:
                was_ended = _was_ended_by_others(process) and not self._closed
                self._end()
                if was_ended:
                    raise CompilerError("its process was ended from outside; send the request again") from None
                raise GrammarError(
                    f"{TOO_LARGE}: the compiler ended over it, as too much memory or nesting does; {HOW_TO_SHRINK}"
                ) from None
        if not answer.loaded:
            raise CompilerError(answer.error)
        if answer.error:
            raise GrammarError(answer.error)
        if len(answer.compiled) > MAX_COMPILED_BYTES:
            raise GrammarError(
                f"{TOO_LARGE}: its compiled form has {len(answer.compiled)} bytes, over the limit of "
                f"{MAX_COMPILED_BYTES}; {HOW_TO_SHRINK}"
            )
        return answer.compiled

    def close(self) -> None:
        """End the process."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._busy:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise CompilerError("the engine was shut down")
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "sglang_lite.grammar.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        try:
            answer = self._ask(process, encode(self._setup), START_SECONDS)
        except (TimeoutError, EOFError) as error:
            self._end()
            raise CompilerError(f"the grammar compiler did not start: {type(error).__name__}") from error
        if not answer.loaded:
            self._end()
            raise CompilerError(answer.error)
        return process

    def _ask(self, process: subprocess.Popen[bytes], message: bytes, seconds: float) -> Answer:
        """Send a message and wait for the answer.

        Raises:
            TimeoutError, EOFError: it did not come, or the process ended.
        """
        assert process.stdin is not None and process.stdout is not None  # they are pipes
        deadline = time.monotonic() + seconds
        _send(process.stdin.fileno(), message, deadline)
        descriptor = process.stdout.fileno()
        (length,) = LENGTH.unpack(_receive(descriptor, LENGTH.size, deadline))
        return decode_answer(_receive(descriptor, length, deadline))

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # what was not read is lost with the process
                    stream.close()
        process.wait()


def _was_ended_by_others(process: subprocess.Popen[bytes]) -> bool:
    """Whether it was the machine or somebody else that ended a process whose output has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_SECONDS)
    return process.returncode in (-signal.SIGKILL, -signal.SIGTERM)


def _send(descriptor: int, message: bytes, deadline: float) -> None:
    """Write all of ``message``, which a process that reads nothing does not hold up beyond the deadline."""
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    os.set_blocking(descriptor, False)
    view = memoryview(message)
    while view:
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            raise TimeoutError
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            continue
        except BrokenPipeError:
            raise EOFError from None


def _receive(descriptor: int, count: int, deadline: float) -> bytes:
    """``count`` bytes. The pipe is read directly, so that nothing waits in a buffer that ``poll`` does not see."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    received = bytearray()
    while len(received) < count:
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            raise TimeoutError
        part = os.read(descriptor, min(count - len(received), 1 << 20))
        if not part:
            raise EOFError
        received += part
    return bytes(received)
