"""The grammar that holds a model to the calls of a request, and how the answer is then read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from sglang_lite.frontend.parsing.call_syntax import CallSyntax
from sglang_lite.frontend.parsing.formats import CALLS_ONLY, TOOL_FORMATS, ToolFormat
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.frontend.tool_choice import ToolChoice
from sglang_lite.grammar.backends import installed_backend
from sglang_lite.grammar.base import GrammarError
from sglang_lite.grammar.json_schema import check_parts
from sglang_lite.types import Grammar, RequestError


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """What a request's tools ask for.

    Attributes:
        calls: how calls are read, None to leave them in the content.
        grammar: what the answer has to match, None for anything.
        covers_all: it shapes the whole answer; else the text around the calls is free.
    """

    calls: ToolFormat | None
    grammar: Grammar | None = None
    covers_all: bool = False


_backend = cache(installed_backend)


def call_grammar(
    tools: ToolChoice, parser: str | None, backend: str | None, tokenizer: Tokenizer | None
) -> CallGrammar:
    """How a request's tools constrain its answer.

    A call that has to be made is written in the format of the parser where a structural tag can say that, else as a
    JSON array. Where the model is free to call, the schemas of functions with ``strict`` are enforced where the format
    has a structural tag.

    Args:
        parser: name of the format of calls, None for none.
        backend: ``--grammar-backend``.

    Raises:
        RequestError: a schema that has to be enforced cannot be.
    """
    calls = TOOL_FORMATS[parser] if parser is not None and tools.shown else None
    if not tools.forced and not (tools.strict and calls is not None):
        return CallGrammar(calls)
    schemas, single = tools.toolset.schemas, not tools.toolset.parallel
    syntax = None
    if calls is not None and _backend(backend) == "xgrammar":
        syntax = _syntax_of(calls, tokenizer)
    if syntax is None or not syntax.writes(schemas):
        if not tools.forced:
            return CallGrammar(calls)
        return CallGrammar(CALLS_ONLY, Grammar("json_schema", tools.schema(single=single), compact=True), True)
    _check_schemas(tools)
    if tools.forced:
        return CallGrammar(calls, Grammar("structural_tag", syntax.forced(schemas, single=single)), True)
    return CallGrammar(calls, Grammar("structural_tag", syntax.free(schemas, tools.strict, single=single)))


def _syntax_of(form: ToolFormat, tokenizer: Tokenizer | None) -> CallSyntax | None:
    """How the model writes calls."""
    if tokenizer is None:
        return None
    return next((one for one in form.syntaxes if not one.needs or tokenizer.token_to_id(one.needs) is not None), None)


def _check_schemas(tools: ToolChoice) -> None:
    """Name the tool whose schema cannot be enforced, before the compiler names a place in the structural tag."""
    for index, (name, schema) in enumerate(tools.toolset.schemas.items()):
        if tools.forced or name in tools.strict:
            try:
                check_parts(schema, f"tools/{index}/function/parameters", "xgrammar")
            except GrammarError as error:
                raise RequestError(f"tools: {error}", field="tools") from error
