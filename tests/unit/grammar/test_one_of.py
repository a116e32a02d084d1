"""Branches of ``oneOf``: told apart for certain, or refused."""

from __future__ import annotations

import itertools
import random
from typing import Any

import jsonschema
import pytest

from sglang_lite.grammar.base import GrammarError
from sglang_lite.grammar.json_schema import check_parts
from sglang_lite.grammar.one_of import are_disjoint, check_one_of


def tagged(kind: Any, *, required: bool = True, name: str = "kind", **properties: Any) -> dict[str, Any]:
    needed = {"required": [name]} if required else {}
    return {"type": "object", "properties": {name: {"const": kind}, **properties}, **needed}


ROOT = {"$defs": {"cat": tagged("cat"), "dog": tagged("dog"), "loop": {"$ref": "#/$defs/loop"}}}
DISJOINT: list[tuple[Any, Any]] = [
    ({"type": "string"}, {"type": "number"}),
    ({"type": ["string", "null"]}, {"type": "array"}),
    ({"const": 1}, {"const": 2}),
    ({"const": 1}, {"const": True}),
    ({"enum": ["a", "b"]}, {"type": "string", "minLength": 2}),
    ({"const": None}, {"type": "string"}),
    ({"type": "integer", "maximum": 3}, {"type": "number", "minimum": 4}),
    ({"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}),
    (tagged("cat"), tagged("dog")),
    (tagged("cat"), tagged("dog", required=False)),
    ({"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}),
    ({"anyOf": [tagged("cat"), {"type": "string"}]}, tagged("dog")),
    ({"type": "object", "required": ["a"]}, {"type": "object", "properties": {}, "additionalProperties": False}),
    ({"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}),
    ({"type": "array", "minItems": 1, "items": {"type": "string"}}, {"type": "array", "items": {"type": "null"}}),
    (False, {}),
]
MAYBE_NOT: list[tuple[Any, Any]] = [
    ({"type": "integer"}, {"type": "number"}),
    ({}, {"type": "string"}),
    ({"const": 1}, {"const": 1.0}),
    ({"type": "integer", "maximum": 3}, {"type": "number", "minimum": 3}),
    ({"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}),
    (tagged("cat", required=False), tagged("dog", required=False)),
    ({"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}),
    ({"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "null"}}),
    ({"$ref": "#/$defs/loop"}, {"type": "string"}),
    (True, {"type": "string"}),
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 1.0, 2.5, 3, 4, "", "a", "b", "ab", "abcd"),
    *([], [None], ["a"], ["a", "b"], {}, {"a": 1}, {"b": 2}, {"kind": "cat"}, {"kind": "dog"}, {"kind": "cat", "a": 1}),
]


@pytest.mark.parametrize(("first", "second"), DISJOINT)
def test_branches_that_cannot_both_match(first: Any, second: Any) -> None:
    assert are_disjoint(first, second, ROOT)
    assert are_disjoint(second, first, ROOT)
    check_one_of({"oneOf": [first, second]}, "#", ROOT, "xgrammar")


@pytest.mark.parametrize(("first", "second"), MAYBE_NOT)
def test_branches_that_may(first: Any, second: Any) -> None:
    assert not are_disjoint(first, second, ROOT)
    with pytest.raises(GrammarError, match=r"at #/x/oneOf .*branches 0 and 1 may both match"):
        check_one_of({"oneOf": [first, second]}, "#/x", ROOT, "xgrammar")


def test_no_proof_is_wrong() -> None:
    """Over pairs of all these schemas and what they make together: no value is in two that are told apart."""
    draw = random.Random(3)
    simple = [one for pair in (*DISJOINT, *MAYBE_NOT) for one in pair if one != {"$ref": "#/$defs/loop"}]
    made = [{"anyOf": draw.sample(simple, 2)} for _ in range(20)]
    made += [tagged("x", inner=draw.choice(simple), required=draw.random() < 0.5) for _ in range(10)]
    made += [{"type": "array", "items": draw.choice(simple), "minItems": draw.randrange(2)} for _ in range(10)]
    values = [*VALUES, *([value] for value in VALUES), *({"kind": "x", "inner": value} for value in VALUES)]
    schemas = [*simple, *made]
    accepted = []
    for schema in schemas:
        whole = {**ROOT, **schema} if isinstance(schema, dict) else schema
        validator = jsonschema.Draft202012Validator(whole)
        accepted.append({index for index, value in enumerate(values) if validator.is_valid(value)})
    proofs = 0
    for (first, left), (second, right) in itertools.combinations(zip(schemas, accepted, strict=True), 2):
        if are_disjoint(first, second, ROOT):
            proofs += 1
            assert not left & right, (first, second)
    assert proofs > 500


def test_every_one_of_of_a_schema_is_looked_at() -> None:
    schema = {"type": "object", "properties": {"x": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}
    with pytest.raises(GrammarError, match="#/properties/x/oneOf"):
        check_parts(schema, "#", "xgrammar")


def test_many_branches_need_a_property_that_tells_them_apart() -> None:
    check_parts({"oneOf": [tagged(number) for number in range(2000)]}, "#", "xgrammar")
    same = [tagged(number, required=False) for number in range(2000)]
    with pytest.raises(GrammarError, match="#/oneOf has 2000 branches"):
        check_parts({"oneOf": same}, "#", "xgrammar")
