"""The smaller text of a grammar says the same: the masks of a walk through both are equal."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from sglang_lite.grammar import xgrammar_backend
from sglang_lite.grammar.base import GrammarError, Vocabulary
from sglang_lite.grammar.xgrammar_backend import XgrammarBackend
from sglang_lite.grammar.xgrammar_text import simplified
from sglang_lite.types import Grammar

END = 256
VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], END + 1, (END,))
OBJECT = {"type": "object", "additionalProperties": False}
SCHEMAS: list[Any] = [
    {**OBJECT, "properties": {f"p{n}": {"type": "integer"} for n in range(6)}, "required": [f"p{n}" for n in range(6)]},
    {**OBJECT, "properties": {f"p{n}": {"type": "boolean"} for n in range(6)}},
    {**OBJECT, "properties": {"root_1": {"const": "root_1 (|)"}, "w[": {"enum": ["a]", '"']}}, "required": ["w["]},
    {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"enum": [1, 2]}}]}},
    },
    {
        "$defs": {"tree": {**OBJECT, "properties": {"next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}}},
        "$ref": "#/$defs/tree",
    },
    {"type": "array", "prefixItems": [{"type": "string", "maxLength": 2}, {"type": "null"}], "minItems": 2},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "object"},
]


@pytest.fixture(scope="module")
def backend() -> XgrammarBackend:
    return XgrammarBackend(VOCABULARY)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_the_same_grammar(
    backend: XgrammarBackend, monkeypatch: pytest.MonkeyPatch, schema: Any, compact: bool
) -> None:
    grammar = Grammar("json_schema", json.dumps(schema), compact)
    smaller = backend.load(backend.compile(grammar))
    monkeypatch.setattr(xgrammar_backend, "simplified", lambda text: text)
    plain = backend.load(backend.compile(grammar))
    ours, theirs = np.zeros(VOCABULARY.mask_width, np.int32), np.zeros(VOCABULARY.mask_width, np.int32)
    for seed in range(6):
        random, one, other = np.random.default_rng(seed), smaller.matcher(), plain.matcher()
        for _ in range(150):
            one.fill(ours)
            other.fill(theirs)
            assert (ours == theirs).all()
            allowed = np.flatnonzero(np.unpackbits(ours.view(np.uint8), bitorder="little")[: END + 1])
            likely = [token for token in allowed.tolist() if token == END or chr(token) in '}],:"']
            token = int(random.choice(likely if likely and random.random() < 0.5 else allowed))
            assert one.accept(token)
            assert other.accept(token)
            if token == END:
                break


@pytest.mark.parametrize(
    "limits", [{"maxLength": 1}, {"maxLength": 3}, {"minLength": 2}, {"minLength": 1, "maxLength": 1}]
)
def test_no_string_holds_control_characters(backend: XgrammarBackend, limits: dict[str, int]) -> None:
    """Whatever rule the library writes for a length: JSON takes none of them."""
    for schema in (
        {"type": "string", **limits},
        {"type": "array", "items": {"type": "string", **limits}, "minItems": 1},
    ):
        matcher = backend.load(backend.compile(Grammar("json_schema", json.dumps(schema)))).matcher()
        mask = np.zeros(VOCABULARY.mask_width, np.int32)
        for token in b'"' if schema["type"] == "string" else b'["':
            assert matcher.accept(token)
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: END + 1])
        assert ord("a") in allowed
        assert allowed.min() >= 0x20


def test_required_properties_cost_in_proportion(backend: XgrammarBackend) -> None:
    def size(count: int, compact: bool) -> int:
        names = [f"p{number}" for number in range(count)]
        schema = {**OBJECT, "properties": {name: {"type": "integer"} for name in names}, "required": names}
        return len(backend.compile(Grammar("json_schema", json.dumps(schema), compact)))

    for compact in (False, True):
        assert size(200, compact) < 5 * size(50, compact)


def test_too_many_properties_are_refused(backend: XgrammarBackend) -> None:
    schema = {"type": "object", "properties": {"x": {"properties": {f"p{n}": {} for n in range(4096)}}}}
    with pytest.raises(GrammarError, match="too large: JSON Schema at # has more than 4096 properties"):
        backend.compile(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize("text", ["", "no rule\n", "a ::= b\na ::= c\nroot ::= a\n", "a ::= (b)\n"])
def test_text_that_the_library_does_not_write_stays(text: str) -> None:
    assert simplified(text) == text


def test_what_is_put_in_its_place() -> None:
    text = 'root ::= (("a" b c d{0, 2}))\nb ::= (("x" | "y"))\nc ::= (("(" e "b"))\ne ::= (([|)] "e"))\nd ::= (("d"))\n'
    smaller = 'root ::= (("a" b "(" [|)] "e" "b" d{0, 2}))\nb ::= (("x" | "y"))\nd ::= (("d"))\n'
    assert simplified(text) == smaller
