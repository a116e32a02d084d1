"""Grammars by the llguidance library."""

from __future__ import annotations

from typing import Any, assert_never

import msgspec
import numpy as np

from sglang_lite.grammar.base import UNDECIDED, GrammarError, TokenMatcher, Vocabulary
from sglang_lite.grammar.endless import check_ends
from sglang_lite.grammar.json_schema import ANY_JSON, checked_parts, decode_schema
from sglang_lite.grammar.locating import pointer_to_fault
from sglang_lite.types import Grammar, Int32Array

WHITESPACE = r"[ \n\r\t]{0,20}"
"""Whitespace between the parts of a JSON text: bounded, as in ``xgrammar_backend``."""

COMPACT_WHITESPACE = r"[ \n\r\t]?"
"""The same where a grammar is compact."""

_ONE_OF = "two branches of oneOf may both match; use anyOf, or tell them apart by a required property"

_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
_COMPACT = {"whitespace_flexible": True, "whitespace_pattern": COMPACT_WHITESPACE}


class LlguidanceBackend:
    """See ``GrammarBackend``. What it calls compiled is the grammar's text: a matcher is made of that at once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance
        from llguidance.gbnf_to_lark import any_to_lark

        self._library: Any = llguidance
        self._to_lark: Any = any_to_lark
        self._width = vocabulary.mask_width
        self._end_ids = frozenset(vocabulary.end_ids)
        wrapper = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer: Any = llguidance.LLTokenizer(
            wrapper, n_vocab=vocabulary.size, eos_token=list(vocabulary.end_ids)
        )

    def compile(self, grammar: Grammar) -> bytes:
        """See ``GrammarBackend.compile``."""
        try:
            text: str = self._text(grammar)
        except ValueError as error:
            raise GrammarError(str(error)) from error
        fault = self._fault_of(text)
        if fault and grammar.kind == "json_schema" and grammar.text != ANY_JSON:
            pointer = pointer_to_fault(decode_schema(grammar.text), self._fault_of_schema)
            raise GrammarError(f"JSON Schema at {pointer}: {fault}")
        if fault:
            raise GrammarError(fault)
        return text.encode()

    def _fault_of(self, text: Any) -> str:
        """Why a grammar cannot be used, empty when it can."""
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            fault = _first_line(matcher.get_error()) or "it is malformed"
            return _ONE_OF if fault.startswith("oneOf constraints") else fault
        bits = np.zeros(self._width, dtype=np.int32)
        _Matcher(matcher, self._end_ids).fill(bits)
        if matcher.is_error() or not bits.any():
            return _first_line(matcher.get_error()) or "no text matches it"
        return ""

    def _fault_of_schema(self, schema: Any) -> str:
        try:
            text = self._library.LLMatcher.grammar_from_json_schema(msgspec.json.encode(schema).decode())
        except ValueError as error:
            return str(error)
        return self._fault_of(text)

    def load(self, compiled: bytes) -> LlguidanceGrammar:
        """See ``GrammarBackend.load``."""
        matcher = self._library.LLMatcher(self._tokenizer, compiled.decode(), log_level=0)
        return LlguidanceGrammar(matcher, self._end_ids)

    def _text(self, grammar: Grammar) -> Any:
        matcher = self._library.LLMatcher
        match grammar.kind:
            case "json_schema":
                # The library knows no schema "true", which says the same as an empty one.
                if grammar.text != ANY_JSON:
                    decoded = decode_schema(grammar.text)
                    for _ in checked_parts(decoded, "#"):
                        pass  # it raises what is wrong
                    check_ends(decoded)
                schema = "{}" if grammar.text == ANY_JSON or grammar.text.strip() == "true" else grammar.text
                return matcher.grammar_from_json_schema(schema, overrides=_COMPACT if grammar.compact else _OPTIONS)
            case "regex":
                return matcher.grammar_from_regex(grammar.text)
            case "ebnf":
                return matcher.grammar_from_lark(self._to_lark(grammar.text))
            case "structural_tag":
                return self._structural_tag(grammar.text)
        assert_never(grammar.kind)

    def _structural_tag(self, text: str) -> Any:
        tag = msgspec.json.decode(text)
        if not isinstance(tag, dict) or "structures" not in tag:
            raise GrammarError("llguidance takes structural tags with structures and triggers only; use xgrammar")
        if tag.get("at_least_one"):
            raise GrammarError("llguidance does not enforce at_least_one of a structural tag; use xgrammar")
        tags = [
            self._library.StructTag(
                trigger=_trigger_of(item["begin"], tag.get("triggers", [])),
                begin=item["begin"],
                grammar={**(item.get("schema") or {}), "x-guidance": _OPTIONS},
                end=item["end"],
            )
            for item in tag["structures"]
        ]
        return self._library.StructTag.to_grammar(tags, assume_special=False)


class LlguidanceGrammar:
    """See ``CompiledGrammar``."""

    def __init__(self, matcher: Any, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_ids = end_ids

    def matcher(self) -> TokenMatcher:
        """See ``CompiledGrammar.matcher``."""
        return _Matcher(self._matcher.deep_copy(), self._end_ids)


class _Matcher:
    """See ``TokenMatcher``."""

    def __init__(self, matcher: Any, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._terminated = False

    def accept(self, token: int) -> bool:
        if self._terminated:
            return False
        if token in self._end_ids:
            self._terminated = bool(self._matcher.is_accepting())
            return self._terminated
        # A refused token would put the library's matcher out of use, so it is tried first.
        return self._matcher.validate_tokens([token]) == 1 and bool(self._matcher.consume_token(token))

    def fill(self, bits: Int32Array) -> None:
        if self._terminated:
            bits.fill(UNDECIDED)
            return
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        bits.fill(0)
        bits[: len(mask)] = mask[: len(bits)]

    def rollback(self, count: int) -> None:
        if count and self._terminated:  # the library was not told of the end
            self._terminated = False
            count -= 1
        if count:
            self._matcher.rollback(count)

    def forced(self) -> list[int]:
        return [] if self._terminated else list(self._matcher.compute_ff_tokens())

    @property
    def is_terminated(self) -> bool:
        return self._terminated


class _Tokens:
    """A vocabulary as the library asks for it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens + [b""] * (vocabulary.size - len(vocabulary.tokens))
        self.eos_token_id = vocabulary.end_ids[0]
        self.special_token_ids = list(vocabulary.end_ids)
        self._ids = {token: index for index, token in reversed(list(enumerate(self.tokens))) if token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Greedy, longest token first: used for forced tokens only."""
        ids = []
        place = 0
        while place < len(text):
            for length in range(min(self._longest, len(text) - place), 0, -1):
                token = self._ids.get(text[place : place + length])
                if token is not None:
                    ids.append(token)
                    break
            else:
                length = 1
            place += length
        return ids


def _trigger_of(begin: str, triggers: Any) -> str:
    for trigger in triggers if isinstance(triggers, list) else []:
        if isinstance(trigger, str) and begin.startswith(trigger):
            return trigger
    raise GrammarError(f"no trigger of the structural tag is the start of {begin[:80]!r}")


def _first_line(message: str) -> str:
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    # The reason of a broken pattern is in its last line, below a picture of the place.
    return lines[0][:1000] if len(lines) == 1 or not lines[0].endswith(":") else f"{lines[0]} {lines[-1]}"[:1000]
