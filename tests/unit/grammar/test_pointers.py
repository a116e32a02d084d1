"""What the libraries find wrong with a schema, with the place that they do not name; and what is too large."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_lite.grammar.backends import check_text
from sglang_lite.grammar.base import GrammarError, Vocabulary
from sglang_lite.grammar.llguidance_backend import LlguidanceBackend
from sglang_lite.grammar.locating import pointer_to_nul
from sglang_lite.grammar.process import CompilerProcess
from sglang_lite.grammar.xgrammar_backend import XgrammarBackend
from sglang_lite.types import Grammar, RequestError

VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], 257, (256,))


@pytest.fixture(scope="module")
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(VOCABULARY)


def held(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a/b": {"type": "array", "items": schema}}, "required": ["a/b"]}


AT = "#/properties/a~1b/items"
FAULTS: list[tuple[Any, str, str]] = [
    (held({"type": []}), AT, "empty list"),
    (held({"type": "nope"}), AT, "'nope'"),
    (held(5), AT, "object or a boolean"),
    (held({"not": {}}), AT, "not"),
    (held({"type": "string", "pattern": "(?<=x)y"}), AT, "look-behind"),
    (held({"type": "string", "format": "nope"}), AT, "format"),
    (held({"oneOf": [{"type": "integer"}, {"type": "number"}]}), AT, "oneOf may both match"),
    (held({"$ref": "#/$defs/none"}), AT, "does not exist"),
    ({"$defs": {"x": held({"not": {}})}, **held({"$ref": "#/$defs/x"})}, "#/$defs/x/properties/a~1b/items", "not"),
    ({"if": {}}, "#", "if"),
]


@pytest.mark.parametrize(("schema", "pointer", "what"), FAULTS)
def test_where_a_schema_is_wrong(backend: LlguidanceBackend, schema: Any, pointer: str, what: str) -> None:
    with pytest.raises(GrammarError) as caught:
        backend.compile(Grammar("json_schema", json.dumps(schema)))
    message = str(caught.value)
    assert message.startswith(f"JSON Schema at {pointer}"), message
    assert what in message


@pytest.mark.parametrize(
    ("schema", "pointer", "what"),
    [
        (held({"type": "string", "pattern": "(?<=x)y"}), AT, "Lookbehind"),
        (
            {"$defs": {"x": held({"type": "string", "pattern": "("})}, **held({"$ref": "#/$defs/x"})},
            "#/$defs/x" + AT[1:],
            "parenthesis",
        ),
        (False, "#", "no text matches"),
    ],
)
def test_where_xgrammar_finds_fault(schema: Any, pointer: str, what: str) -> None:
    with pytest.raises(GrammarError) as caught:
        XgrammarBackend(VOCABULARY).compile(Grammar("json_schema", json.dumps(schema)))
    message = str(caught.value)
    assert message.startswith(f"JSON Schema at {pointer}"), message
    assert what in message


@pytest.mark.parametrize(
    ("document", "pointer"),
    [
        ({"enum": ["a", "b\0"]}, "#/enum/1"),
        ({"properties": {"a/b": {"const": "\0"}, "c": {"const": "\0"}}}, "#/properties/a~1b/const"),
        ({"properties": {"\0": {}}}, "#/properties"),
    ],
)
def test_where_a_null_character_is(document: Any, pointer: str) -> None:
    assert pointer_to_nul(json.dumps(document)) == pointer
    with pytest.raises(RequestError, match=re.escape(f"Invalid json_schema at {pointer}: NUL")):
        check_text(Grammar("json_schema", json.dumps(document)))


def test_no_place_in_what_is_no_json() -> None:
    assert pointer_to_nul("{") == pointer_to_nul("[" * 100_000) == pointer_to_nul("{}") == "#"


@pytest.fixture(scope="module")
def process() -> Iterator[CompilerProcess]:
    made = CompilerProcess("xgrammar", VOCABULARY, 60.0)
    yield made
    made.close()


def test_a_schema_that_is_too_large_is_told_so(process: CompilerProcess) -> None:
    many = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1500)}}
    with pytest.raises(GrammarError, match=r"the grammar is too large: .* left out cost most"):
        process.compile(Grammar("json_schema", json.dumps({**many, "additionalProperties": False})))
    names = list(many["properties"])
    assert process.compile(Grammar("json_schema", json.dumps({**many, "required": names})))
