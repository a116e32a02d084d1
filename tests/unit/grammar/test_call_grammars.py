"""Grammars of calls against a model that draws at random: what it writes are calls, in every format and every cut."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from sglang_lite.frontend.parsing.answer import Answer, AnswerFormat, AnswerParser, collect, parse_answer
from sglang_lite.frontend.parsing.call_syntax import CALL_MARKERS, CallSyntax
from sglang_lite.frontend.parsing.events import Toolset
from sglang_lite.frontend.parsing.formats import TOOL_FORMATS
from sglang_lite.grammar.base import CompiledGrammar, Vocabulary
from sglang_lite.grammar.xgrammar_backend import XgrammarBackend
from sglang_lite.types import Grammar

END = 256 + len(CALL_MARKERS)
VOCABULARY = Vocabulary(
    [*(bytes([byte]) for byte in range(256)), *(b"" for _ in CALL_MARKERS), b""],
    END + 1,
    (END,),
    {256 + index: marker.encode() for index, marker in enumerate(CALL_MARKERS)},
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "unit": {"enum": ["celsius", "very hot"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 12},
            "where": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
            "code": {"type": "string", "pattern": "[a-c]{2}"},
            "name": {"type": "string", "maxLength": 3},
        },
        "required": ["unit", "days", "where", "code"],
        "additionalProperties": False,
    },
    "g-2": {"type": "object", "properties": {}, "additionalProperties": False},
}
NAMES = {syntax: name for name, form in TOOL_FORMATS.items() for syntax in form.syntaxes}
CASES = [pytest.param(name, syntax, id=f"{name}{'-args' if syntax.needs else ''}") for syntax, name in NAMES.items()]


@pytest.fixture(scope="module")
def backend() -> XgrammarBackend:
    return XgrammarBackend(VOCABULARY)


def compiled(backend: XgrammarBackend, text: str) -> CompiledGrammar:
    return backend.load(backend.compile(Grammar("structural_tag", text)))


def drawn(grammar: CompiledGrammar, seed: int, begin: str = "", steps: int = 2000) -> str:
    """What a model without any idea writes: ``begin``, then whatever is allowed, markers and the end often."""
    random, matcher = np.random.default_rng(seed), grammar.matcher()
    bits = np.zeros(VOCABULARY.mask_width, dtype=np.int32)
    seen, tokens = VOCABULARY.with_markers().tokens, list(begin.encode())
    for token in tokens:
        assert matcher.accept(token), begin
    for _ in range(steps):
        matcher.fill(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: END + 1])
        likely = [token for token in allowed.tolist() if token == END or token > 255 or chr(token) in "}]\n <"]
        plain = [token for token in allowed.tolist() if 32 <= token < 127] or allowed.tolist()
        token = int(random.choice(likely if likely and random.random() < 0.4 else plain))
        token = END if END in allowed and random.random() < 0.5 else token
        assert matcher.accept(token)
        if token == END:
            return b"".join(seen[token] for token in tokens).decode("utf-8", "replace")
        tokens.append(token)
    raise AssertionError(b"".join(seen[token] for token in tokens)[:1000])


def read(name: str, text: str, *, parallel: bool = True) -> Answer:
    """The answer of a text, which is the same whole and character by character."""
    how = AnswerFormat(calls=TOOL_FORMATS[name], tools=Toolset(SCHEMAS, parallel=parallel))
    parser = AnswerParser(how)
    streamed = collect([delta for character in text for delta in parser.push(character)] + parser.finish())
    whole = parse_answer(text, how)
    assert streamed == whole, text
    return whole


def check(answer: Answer, text: str) -> None:
    for call in answer.calls:
        try:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError(text) from error


@pytest.mark.parametrize(("name", "syntax"), CASES)
def test_forced_calls_follow_their_schemas(backend: XgrammarBackend, name: str, syntax: CallSyntax) -> None:
    grammar = compiled(backend, syntax.forced(SCHEMAS, single=False))
    names = set()
    for seed in range(12):
        text = drawn(grammar, seed)
        answer = read(name, text)
        assert (answer.content, bool(answer.calls)) == ("", True), text
        check(answer, text)
        names |= {call.name for call in answer.calls}
    assert names == set(SCHEMAS)


def written(syntax: CallSyntax, count: int) -> str:
    """Calls of the function without parameters, as models write them."""
    name = '"g-2"' if syntax.quoted else "g-2"
    calls = []
    for number in range(count):
        begin = syntax.begin % name + (f"{number}{syntax.number_end}" if syntax.number_end else "")
        calls.append(begin + ("{}" if syntax.style == "json" else "") + syntax.end)
    return syntax.section + syntax.separator.join(calls) + syntax.section_end


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.accept(token) for token in text.encode()) and matcher.accept(END)


@pytest.mark.parametrize(("name", "syntax"), CASES)
def test_how_many_calls(backend: XgrammarBackend, name: str, syntax: CallSyntax) -> None:
    for count, single, allowed in ((0, False, False), (1, True, True), (2, True, False), (3, False, True)):
        text = written(syntax, count)
        assert accepts(compiled(backend, syntax.forced(SCHEMAS, single=single)), text) == allowed, text
        free = compiled(backend, syntax.free(SCHEMAS, (), single=single))
        if count:
            assert accepts(free, f"Well: {text}") == allowed, text
            assert len(read(name, text).calls) == count


@pytest.mark.parametrize(("name", "syntax"), CASES)
def test_a_single_forced_call(backend: XgrammarBackend, name: str, syntax: CallSyntax) -> None:
    grammar = compiled(backend, syntax.forced({"get_weather": SCHEMAS["get_weather"]}, single=True))
    for seed in range(5):
        text = drawn(grammar, seed)
        [call] = read(name, text, parallel=False).calls
        assert call.name == "get_weather"
        # Whitespace is bounded, so that the whole call is.
        assert len(text) < 400


@pytest.mark.parametrize(("name", "syntax"), CASES)
def test_a_free_answer_may_have_none_but_none_that_is_wrong(
    backend: XgrammarBackend, name: str, syntax: CallSyntax
) -> None:
    # Without a schema the tagged formats take texts of any length, which a model like this never ends.
    strict = {"get_weather"} if syntax.style == "json" else set(SCHEMAS)
    grammar = compiled(backend, syntax.free(SCHEMAS, strict, single=False))
    assert read(name, drawn(grammar, 1, "Well, no.")).calls == []
    found = 0
    for seed in range(6):
        text = drawn(grammar, seed, f"Well: {syntax.trigger}")
        answer = read(name, text)
        assert answer.content.startswith("Well:")
        check(Answer(calls=[call for call in answer.calls if call.name in strict]), text)
        assert all(isinstance(json.loads(call.arguments), dict) for call in answer.calls)
        found += len(answer.calls)
    assert found >= 6


def test_other_grammars_see_no_markers(backend: XgrammarBackend) -> None:
    matcher = backend.load(backend.compile(Grammar("regex", "<tool_call>x"))).matcher()
    assert not matcher.accept(256 + CALL_MARKERS.index("<tool_call>"))
    assert matcher.accept(ord("<"))


def test_names_that_look_like_markup_are_left_to_json() -> None:
    for syntax in NAMES:
        assert syntax.writes(["get-weather_2.x"])
        assert syntax.writes(['a">b']) == syntax.quoted
