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
"""Grammars that a front takes for granted in the engine, which keeps many more."""


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
    """

    def __init__(self, compiler: GrammarCompiler, send: Callable[[str, bytes], Awaitable[None]]) -> None:
        self._compiler = compiler
        self._send = send
        self._sent: OrderedDict[str, asyncio.Task[None]] = OrderedDict()

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
        task = self._sent.get(compiled.identity)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._sent[compiled.identity] = asyncio.create_task(self._load(compiled))
        self._sent.move_to_end(compiled.identity)
        while len(self._sent) > KNOWN_GRAMMARS:
            self._sent.popitem(last=False)
        await asyncio.shield(task)
        return compiled.identity

    def clear(self) -> None:
        """Forget what was compiled."""
        self._compiler.clear()

    def close(self) -> None:
        """End the compiler."""
        self._compiler.close()

    async def _load(self, compiled: Compiled) -> None:
        await self._send(compiled.identity, compiled.compiled)
