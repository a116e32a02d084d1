"""Compiling in a process of its own: what a grammar may cost, and what becomes of the others."""

from __future__ import annotations

import fcntl
import os
import signal
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from sglang_lite.grammar import compiler as compiling
from sglang_lite.grammar.backends import BACKENDS, make_backend
from sglang_lite.grammar.base import GrammarError, Vocabulary
from sglang_lite.grammar.compiler import Compiled, GrammarCompiler
from sglang_lite.grammar.process import CompilerError, CompilerProcess
from sglang_lite.types import Grammar, RequestError

END = 257
VOCABULARY = Vocabulary([bytes([byte]) for byte in range(256)] + [b"abc", b""], 300, (END,))


@pytest.fixture(scope="module", params=BACKENDS[:-1])
def compiler(request: pytest.FixtureRequest) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(request.param, lambda: VOCABULARY)
    yield made
    made.close()


def allowed(bits: np.ndarray) -> set[int]:
    return {token for token in range(VOCABULARY.size) if bits.view(np.uint32)[token // 32] >> (token % 32) & 1}


@pytest.mark.parametrize("name", BACKENDS[:-1])
def test_a_matcher_follows_its_grammar(name: str) -> None:
    backend = make_backend(name, VOCABULARY)
    grammar = backend.load(backend.compile(Grammar("regex", "ab(c|d)")))
    matcher, other = grammar.matcher(), grammar.matcher()
    bits = np.empty(VOCABULARY.mask_width, dtype=np.int32)
    matcher.fill(bits)
    assert allowed(bits) == {ord("a"), 256}
    assert not matcher.accept(ord("x"))
    assert not matcher.accept(END)
    assert matcher.accept(256)
    matcher.fill(bits)
    assert allowed(bits) == {END}
    assert not matcher.is_terminated
    assert matcher.accept(END)
    assert matcher.is_terminated
    matcher.fill(bits)
    assert len(allowed(bits)) == VOCABULARY.size, "what comes behind the end is nobody's business"
    assert not matcher.accept(ord("a"))
    other.fill(bits)
    assert allowed(bits) == {ord("a"), 256}, "matchers of one grammar are independent"


def test_results_are_kept_by_content(compiler: GrammarCompiler) -> None:
    first = compiler.submit(Grammar("regex", "kept"))
    assert compiler.submit(Grammar("regex", "kept")) is first
    assert compiler.submit(Grammar("regex", "kept ")).result().identity != first.result().identity
    assert compiler.submit(Grammar("ebnf", 'root ::= "kept"')).result().identity != first.result().identity
    failed = compiler.submit(Grammar("regex", "(kept"))
    with pytest.raises(RequestError, match="Failed to compile regex grammar: ") as caught:
        failed.result().checked()
    assert caught.value.status == 400
    assert caught.value.field == "regex"
    assert compiler.submit(Grammar("regex", "(kept")) is failed
    compiler.clear()
    assert compiler.submit(Grammar("regex", "kept")) is not first


def stop(process_id: int) -> None:
    """Stop a child, and wait until it is: until then it would still read what it is sent."""
    os.kill(process_id, signal.SIGSTOP)
    os.waitid(os.P_PID, process_id, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        pytest.param(signal.SIGSEGV, GrammarError, "ended over it", id="its grammar's fault"),
        pytest.param(signal.SIGKILL, CompilerError, "ended from outside", id="nobody's fault that sent a grammar"),
    ],
)
def test_a_process_that_dies_costs_its_grammar_only(number: int, kind: type[Exception], message: str) -> None:
    process = CompilerProcess("xgrammar", VOCABULARY, 30.0)
    try:
        assert process.compile(Grammar("regex", "a"))
        running = process._process
        assert running is not None
        stop(running.pid)
        results: Future[Any] = Future()

        def compile_it() -> None:
            try:
                results.set_result(process.compile(Grammar("regex", "b")))
            except (GrammarError, CompilerError) as error:
                results.set_exception(error)

        thread = threading.Thread(target=compile_it)
        thread.start()
        assert running.stdin is not None
        while not fcntl.ioctl(running.stdin, termios.FIONREAD, bytes(4)).strip(b"\0"):
            time.sleep(0.001)  # until the question is in the pipe
        os.kill(running.pid, number)
        os.kill(running.pid, signal.SIGCONT)
        with pytest.raises(kind, match=message):
            results.result(30)
        thread.join()
        assert process.compile(Grammar("regex", "b")), "the next one gets a new process"
    finally:
        process.close()


def test_a_slow_grammar_is_given_up() -> None:
    process = CompilerProcess("xgrammar", VOCABULARY, 30.0)
    try:
        process.compile(Grammar("regex", "a"))
        assert process._process is not None
        stop(process._process.pid)
        process._seconds = 0.2
        with pytest.raises(GrammarError, match=r"more than 0\.2 seconds"):
            process.compile(Grammar("regex", "b"))
    finally:
        process.close()


def test_a_compiler_that_reads_nothing_is_given_up() -> None:
    """A grammar that is longer than a pipe holds does not keep whoever writes it."""
    process = CompilerProcess("xgrammar", VOCABULARY, 30.0)
    try:
        process.compile(Grammar("regex", "a"))
        assert process._process is not None
        stop(process._process.pid)
        process._seconds = 0.2
        with pytest.raises(GrammarError, match=r"more than 0\.2 seconds"):
            process.compile(Grammar("regex", "b" * 1_000_000))
        process._seconds = 30.0
        assert process.compile(Grammar("regex", "c"))
    finally:
        process.close()


class Slow:
    """In place of a process: compiles when it is told to."""

    def __init__(self, *arguments: Any) -> None:
        self.vocabulary = VOCABULARY
        self.go = threading.Event()
        self.closed = False
        SLOW.append(self)

    def compile(self, grammar: Grammar) -> bytes:
        self.go.wait(30)
        return grammar.text.encode()

    def close(self) -> None:
        self.closed = True
        self.go.set()


SLOW: list[Slow] = []


def test_waiting_is_bounded_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    SLOW.clear()
    monkeypatch.setattr(compiling, "CompilerProcess", Slow)
    monkeypatch.setattr(compiling, "MAX_WAITING", 3)
    monkeypatch.setattr(compiling, "CACHE_ENTRIES", 2)
    compiler = GrammarCompiler("slow", lambda: VOCABULARY)
    futures = [compiler.submit(Grammar("regex", text)) for text in "abc"]
    assert compiler.submit(Grammar("regex", "a")) is futures[0]
    with pytest.raises(RequestError, match="3 grammars wait") as caught:
        compiler.submit(Grammar("regex", "d"))
    assert caught.value.status == 429
    while not all(future.done() for future in futures):
        for slow in list(SLOW):
            slow.go.set()
    assert [future.result().compiled for future in futures] == [b"a", b"b", b"c"]
    assert compiler.submit(Grammar("regex", "c")).result() == Compiled(futures[2].result().identity, b"c")
    compiler.close()
    assert len(SLOW) <= compiling.PROCESSES
    assert all(slow.closed for slow in SLOW)
    assert compiler.num_waiting == 0
    assert len(compiler._known) <= 2
