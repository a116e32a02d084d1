"""What llguidance finds wrong with a schema, with the place that it does not name; and what is too large."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_lite.grammar.base import GrammarError, Vocabulary
from sglang_lite.grammar.llguidance_backend import LlguidanceBackend
from sglang_lite.grammar.process import CompilerProcess
from sglang_lite.types import Grammar

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
