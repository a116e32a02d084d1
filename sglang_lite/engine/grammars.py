"""Grammars in an engine core: loaded once by name, a matcher for each request."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future

from sglang_lite.config import ServerConfig
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.frontend.vocabulary import grammar_vocabulary
from sglang_lite.grammar.backends import installed_backend, make_backend
from sglang_lite.grammar.base import CompiledGrammar, GrammarBackend, TokenMatcher, Vocabulary
from sglang_lite.types import StartupError

MAX_LOADING = 256
"""Grammars that may wait to be loaded: more than the fronts' compilers hand out at once."""

MAX_GRAMMARS = 4096
MAX_BYTES = 1 << 30
"""What a core keeps, the least recently used dropped first. A front keeps far less and sends the rest again."""


class GrammarLibrary:
    """The grammars that a core has been sent.

    Args:
        make: loads the backend, at the first grammar and in a thread: libraries and vocabulary take seconds.
    """

    def __init__(self, make: Callable[[], GrammarBackend]) -> None:
        self._make = make
        self._backend: GrammarBackend | None = None
        self._waiting: deque[tuple[str, bytes, Future[None]]] = deque()
        self._is_loading = False
        self._changing = threading.Lock()
        self._grammars: OrderedDict[str, tuple[CompiledGrammar, int]] = OrderedDict()
        self._bytes = 0

    def load(self, identity: str, compiled: bytes) -> Future[None]:
        """Take a grammar; returns at once."""
        future: Future[None] = Future()
        with self._changing:
            if len(self._waiting) >= MAX_LOADING:
                future.set_exception(StartupError(f"{MAX_LOADING} grammars are being loaded; try again later"))
                return future
            self._waiting.append((identity, compiled, future))
            if not self._is_loading:
                self._is_loading = True
                threading.Thread(target=self._load_waiting, name="load grammars", daemon=True).start()
        return future

    def _load_waiting(self) -> None:
        """Load what waits, one after another; the only thread that does."""
        while True:
            with self._changing:
                if not self._waiting:
                    self._is_loading = False
                    return
                identity, compiled, future = self._waiting.popleft()
            try:
                if self._backend is None:
                    self._backend = self._make()
                if identity not in self._grammars:
                    self._add(identity, self._backend.load(compiled), len(compiled))
            except Exception as error:  # whatever failed, it is the front's to tell
                future.set_exception(error)
            else:
                future.set_result(None)

    def matcher(self, identity: str) -> TokenMatcher | None:
        """A matcher at the start of a grammar, None when it is not here (any more)."""
        with self._changing:
            found = self._grammars.get(identity)
            if found is None:
                return None
            self._grammars.move_to_end(identity)
        return found[0].matcher()

    def _add(self, identity: str, grammar: CompiledGrammar, size: int) -> None:
        with self._changing:
            self._grammars[identity] = grammar, size
            self._bytes += size
            while len(self._grammars) > MAX_GRAMMARS or (self._bytes > MAX_BYTES and len(self._grammars) > 1):
                _, (_, dropped) = self._grammars.popitem(last=False)
                self._bytes -= dropped


def grammar_library(config: ServerConfig, size: int, end_ids: tuple[int, ...]) -> GrammarLibrary | None:
    """The library of a core; None when it serves no grammars.

    Args:
        size: width of the model's logits.
        end_ids: tokens that end a text.
    """
    name = installed_backend(config.grammar_backend)
    if name == "none" or config.skip_tokenizer_init:
        return None

    def vocabulary() -> Vocabulary:
        return grammar_vocabulary(Tokenizer.load(config.effective_tokenizer_path), size, end_ids)

    return GrammarLibrary(lambda: make_backend(name, vocabulary()))
