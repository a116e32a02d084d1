"""Grammars in the core: what is used stays, and what a front takes for granted is there."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from sglang_lite.engine import grammar_front, grammars
from sglang_lite.engine.grammar_front import GrammarFront
from sglang_lite.engine.grammars import GrammarLibrary
from sglang_lite.grammar.base import CompiledGrammar, TokenMatcher
from sglang_lite.grammar.compiler import Compiled
from sglang_lite.types import Grammar
from tests.support.scripted_matcher import ScriptedMatcher


class _Compiled:
    def matcher(self) -> TokenMatcher:
        return ScriptedMatcher(1)


class _Backend:
    def compile(self, grammar: Grammar) -> bytes:
        return grammar.text.encode()

    def load(self, compiled: bytes) -> CompiledGrammar:
        return _Compiled()


class _Compiler:
    num_waiting = 0

    def submit(self, grammar: Grammar) -> Future[Compiled]:
        future: Future[Compiled] = Future()
        future.set_result(Compiled(grammar.text, grammar.text.encode()))
        return future


@pytest.mark.parametrize("limit", ["count", "bytes"])
def test_a_grammar_in_use_is_never_dropped(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Requests with one grammar go on while any number of others come and go."""
    monkeypatch.setattr(grammars, "MAX_GRAMMARS", 40 if limit == "count" else 10_000)
    monkeypatch.setattr(grammars, "MAX_BYTES", 1 << 30 if limit == "count" else 40 * 9)
    monkeypatch.setattr(grammar_front, "KNOWN_GRAMMARS", 10 if limit == "count" else 10_000)
    monkeypatch.setattr(grammar_front, "KNOWN_BYTES", 1 << 30 if limit == "count" else 10 * 9)
    library = GrammarLibrary(_Backend)
    sent: list[str] = []

    async def send(identity: str, compiled: bytes) -> None:
        sent.append(identity)
        await asyncio.wrap_future(library.load(identity, compiled))

    async def requests() -> None:
        front = GrammarFront(_Compiler(), send)  # type: ignore[arg-type]
        for index in range(300):
            for text in (f"other{index:04}", "in use..."):
                identity = await front.ready(Grammar("regex", text))
                assert library.matcher(identity) is not None, (index, text)

    asyncio.run(requests())
    assert sent.count("in use...") == 1


class _Held(_Backend):
    """Loads when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.loaded: list[bytes] = []

    def load(self, compiled: bytes) -> CompiledGrammar:
        assert self.go.wait(30)
        self.loaded.append(compiled)
        return _Compiled()


def test_loading_takes_one_thread_and_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_LOADING", 20)
    backend = _Held()
    library = GrammarLibrary(lambda: backend)
    futures = [library.load(f"g{number}", b"%d" % number) for number in range(60)]
    assert sum(thread.name == "load grammars" for thread in threading.enumerate()) == 1
    refused = [future for future in futures if future.done()]
    assert len(refused) in (39, 40)  # one may have been taken to be loaded meanwhile, at any time
    assert all("20 grammars are being loaded" in str(future.exception()) for future in refused)
    backend.go.set()
    taken = [number for number, future in enumerate(futures) if future not in refused]
    for number in taken:
        futures[number].result(30)
    assert backend.loaded == [b"%d" % number for number in taken]
    library.load("later", b"later").result(30)
    assert library.matcher("later") is not None
