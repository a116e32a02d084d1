"""Grammars on the front's side: compiled, then sent to the engine before the first request that uses them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from sglang_lite.config import ServerConfig
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.frontend.vocabulary import grammar_vocabulary
from sglang_lite.grammar.backends import installed_backend
from sglang_lite.grammar.compiler import NO_BACKEND, Compiled, GrammarCompiler
from sglang_lite.types import Grammar, RequestError

KNOWN_GRAMMARS = 512
KNOWN_BYTES = 1 << 28
"""Grammars that the fronts together take for granted in the engine, which keeps several times as many and as much, the
latest used ones: so what a front knows is there."""


def grammar_compiler(
    config: ServerConfig, tokenizer: Tokenizer | None, size: int, end_ids: tuple[int, ...]
) -> GrammarCompiler | None:
    """The compiler of a front; None when it serves no grammars. Starts nothing."""
    name = installed_backend(config.grammar_backend)
    if name == "none" or tokenizer is None:
        return None
    return GrammarCompiler(name, lambda: grammar_vocabulary(tokenizer, size, end_ids))


def require_compiler(
    compiler: GrammarCompiler | None,
    grammar: Grammar,
    config: ServerConfig,
    end_ids: tuple[int, ...],
    *,
    ignore_eos: bool,
) -> GrammarCompiler:
    """The compiler that a request with a grammar needs.

    Raises:
        RequestError: 400, there is none, or the text could never end.
    """
    if compiler is None:
        raise RequestError(_why_none(config), field=grammar.kind)
    if not end_ids:
        raise RequestError(f"{grammar.kind} needs a model with an end token; this one names none", field=grammar.kind)
    if ignore_eos:
        raise RequestError(
            f"{grammar.kind} cannot be combined with ignore_eos: a text that matches it has to end", field="ignore_eos"
        )
    return compiler


def _why_none(config: ServerConfig) -> str:
    if config.grammar_backend == "none":
        return NO_BACKEND
    if config.skip_tokenizer_init:
        return "json_schema, regex, ebnf and structural_tag need a tokenizer; this server has --skip-tokenizer-init"
    return (
        "json_schema, regex, ebnf and structural_tag need a grammar library, and none is installed on the server: "
        "pip install 'sglang-lite[grammar]'"
    )


class GrammarFront:
    """Makes grammars ready for the requests of one event loop.

    Args:
        send: puts a grammar (its name and compiled form) into every core.
        num_fronts: processes that share the cores.
    """

    def __init__(
        self, compiler: GrammarCompiler, send: Callable[[str, bytes], Awaitable[None]], num_fronts: int = 1
    ) -> None:
        self._compiler = compiler
        self._send = send
        self._most = max(1, KNOWN_GRAMMARS // num_fronts)
        self._most_bytes = KNOWN_BYTES // num_fronts
        self._sent: OrderedDict[str, tuple[asyncio.Task[None], int]] = OrderedDict()
        self._bytes = 0

    @property
    def num_waiting(self) -> int:
        """Grammars being compiled."""
        return self._compiler.num_waiting

    async def ready(self, grammar: Grammar) -> str:
        """The name of a grammar, once the engine has it.

        Raises:
            RequestError: it cannot be compiled or loaded.
        """
        # The future is shared: one request that goes away must not cancel it for the others.
        compiled = (await asyncio.shield(asyncio.wrap_future(self._compiler.submit(grammar)))).checked()
        task = self._known(compiled)
        self._sent.move_to_end(compiled.identity)
        while len(self._sent) > self._most or (self._bytes > self._most_bytes and len(self._sent) > 1):
            _, (_, size) = self._sent.popitem(last=False)
            self._bytes -= size
        await asyncio.shield(task)
        return compiled.identity

    def clear(self) -> None:
        """Forget what was compiled."""
        self._compiler.clear()

    def close(self) -> None:
        """End the compiler."""
        self._compiler.close()

    def _known(self, compiled: Compiled) -> asyncio.Task[None]:
        """What loads the grammar, or has loaded it."""
        task, size = self._sent.get(compiled.identity, (None, 0))
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._load(compiled))
            self._bytes += len(compiled.compiled) - size
            self._sent[compiled.identity] = task, len(compiled.compiled)
        return task

    async def _load(self, compiled: Compiled) -> None:
        await self._send(compiled.identity, compiled.compiled)
