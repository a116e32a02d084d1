"""Grammars by the xgrammar library."""

from __future__ import annotations

import re
from typing import Any, assert_never

import msgspec
import numpy as np

from sglang_lite.grammar.base import UNDECIDED, GrammarError, TokenMatcher, Vocabulary
from sglang_lite.grammar.json_schema import ANY_JSON, check_schema, decode_schema, read_structural_tag
from sglang_lite.grammar.locating import pointer_to_fault
from sglang_lite.grammar.xgrammar_text import simplified
from sglang_lite.types import Grammar, Int32Array

MAX_WHITESPACE = 20
"""Most characters of whitespace in one place of a JSON text: a model that likes newlines must not fill its answer."""

COMPACT_WHITESPACE = 1
"""The same where a grammar is compact."""

_LENIENT_CHARACTER = r"[^\"\\\r\n]"
_STRICT_CHARACTER = r"[^\0-\x1f\"\\\r\n\ud800-\udfff]"
"""A character of a string with a length: the library lets control characters pass, which no JSON reader takes, and
halves of pairs, which are no UTF-8."""

_POSITION = re.compile(r"\[[\d:.]+\] \S+:\d+: ")
_ASSERTION = re.compile(r"Check failed: .*? is false: ")


class XgrammarBackend:
    """See ``GrammarBackend``. Loads the library, and torch with it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._library: Any = xgrammar
        self._width = vocabulary.mask_width
        self._vocabulary = vocabulary
        self._tokenizers: dict[bool, Any] = {}

    def compile(self, grammar: Grammar) -> bytes:
        """See ``GrammarBackend.compile``."""
        sees_markers = grammar.kind == "structural_tag" and bool(self._vocabulary.markers)
        compiler = self._library.GrammarCompiler(self._tokenizer(sees_markers), max_threads=1, cache_enabled=False)
        try:
            compiled = self._compile(compiler, grammar)
        except RuntimeError as error:
            fault = _readable(str(error))
            if grammar.kind == "json_schema" and grammar.text != ANY_JSON:
                place = pointer_to_fault(decode_schema(grammar.text), self._fault_of_schema)
                raise GrammarError(f"JSON Schema at {place}: {fault}") from error
            raise GrammarError(fault) from error
        bits = np.zeros(self._width, dtype=np.int32)
        _Matcher(self._library.GrammarMatcher(compiled)).fill(bits)
        if not bits.any():
            raise GrammarError("no text matches it")
        return bytes([sees_markers]) + bytes(compiled.serialize_json(), "utf-8")

    def _fault_of_schema(self, schema: Any) -> str:
        """What the library says of a schema, empty when it takes it."""
        try:
            self._library.Grammar.from_json_schema(msgspec.json.encode(schema).decode())
        except RuntimeError as error:
            return _readable(str(error))
        return ""

    def load(self, compiled: bytes) -> XgrammarGrammar:
        """See ``GrammarBackend.load``."""
        tokenizer = self._tokenizer(bool(compiled[0]))
        document = compiled[1:].decode()
        return XgrammarGrammar(self._library, self._library.CompiledGrammar.deserialize_json(document, tokenizer))

    def _tokenizer(self, sees_markers: bool) -> Any:
        """The vocabulary as the library takes it; made once each."""
        known = self._tokenizers.get(sees_markers)
        if known is None:
            vocabulary = self._vocabulary.with_markers() if sees_markers else self._vocabulary
            known = self._tokenizers[sees_markers] = self._library.TokenizerInfo(
                vocabulary.tokens,
                self._library.VocabType.RAW,
                vocab_size=vocabulary.size,
                stop_token_ids=list(vocabulary.end_ids),
            )
        return known

    def _compile(self, compiler: Any, grammar: Grammar) -> Any:
        bound = COMPACT_WHITESPACE if grammar.compact else MAX_WHITESPACE
        match grammar.kind:
            case "json_schema":
                if grammar.text == ANY_JSON:
                    return compiler.compile_builtin_json_grammar()
                check_schema(grammar.text, "xgrammar")
                return compiler.compile_grammar(self._schema_grammar(grammar.text, bound))
            case "regex":
                return compiler.compile_regex(grammar.text)
            case "ebnf":
                return compiler.compile_grammar(grammar.text)
            case "structural_tag":
                tag = self._with_grammars(read_structural_tag(grammar.text, "xgrammar"))
                return compiler.compile_structural_tag(msgspec.json.encode(tag).decode())
        assert_never(grammar.kind)

    def _schema_grammar(self, schema: str, bound: int = MAX_WHITESPACE) -> str:
        """The library's own grammar of a schema, without what JSON forbids."""
        text = str(self._library.Grammar.from_json_schema(schema, max_whitespace_cnt=bound))
        return simplified(text.replace(_LENIENT_CHARACTER, _STRICT_CHARACTER))

    def _tagged_grammar(self, node: dict[str, Any]) -> str:
        """The same of a schema whose text is not JSON at its outermost level."""
        tag = {"type": "structural_tag", "format": node}
        text = str(self._library.Grammar.from_structural_tag(msgspec.json.encode(tag).decode()))
        return simplified(text.replace(_LENIENT_CHARACTER, _STRICT_CHARACTER))

    def _with_grammars(self, node: Any) -> Any:
        """A structural tag whose schemas are replaced by their grammars, with whitespace bounded."""
        if isinstance(node, list):
            return [self._with_grammars(inner) for inner in node]
        if not isinstance(node, dict):
            return node
        if node.get("type") == "json_schema" and "json_schema" in node:
            asked = node.get("max_whitespace_cnt")
            bound = min(asked, MAX_WHITESPACE) if isinstance(asked, int) and asked >= 0 else MAX_WHITESPACE
            if node.get("style", "json") != "json" or node.get("any_order") or node.get("excludes"):
                return {"type": "grammar", "grammar": self._tagged_grammar({**node, "max_whitespace_cnt": bound})}
            schema = msgspec.json.encode(node["json_schema"]).decode()
            return {"type": "grammar", "grammar": self._schema_grammar(schema, bound)}
        return {key: self._with_grammars(inner) for key, inner in node.items()}


class XgrammarGrammar:
    """See ``CompiledGrammar``."""

    def __init__(self, library: Any, compiled: Any) -> None:
        self._library = library
        self._compiled = compiled

    def matcher(self) -> TokenMatcher:
        """See ``CompiledGrammar.matcher``."""
        return _Matcher(self._library.GrammarMatcher(self._compiled))


class _Matcher:
    """See ``TokenMatcher``."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._terminated = False

    def accept(self, token: int) -> bool:
        if self._terminated or not self._matcher.accept_token(token):
            return False
        self._terminated = bool(self._matcher.is_terminated())
        return True

    def fill(self, bits: Int32Array) -> None:
        if self._terminated or not self._matcher.fill_next_token_bitmask(bits.reshape(1, -1), 0):
            bits.fill(UNDECIDED)

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
            self._terminated = False

    def forced(self) -> list[int]:
        return [] if self._terminated else list(self._matcher.find_jump_forward_tokens())

    @property
    def is_terminated(self) -> bool:
        return self._terminated


def _readable(message: str) -> str:
    """The library's message without the time and the place in its source that it begins with."""
    return _ASSERTION.sub("", _POSITION.sub("", message)).strip()
