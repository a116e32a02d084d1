"""Parts of schemas and structural tags that would be ignored are refused with a pointer to them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_lite.grammar.base import GrammarError
from sglang_lite.grammar.json_schema import MAX_DEPTH, check_schema, read_structural_tag


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"not": {}}, "#"),
        ({"properties": {"a/b": {"items": {"uniqueItems": True}}}}, "#/properties/a~1b/items"),
        ({"anyOf": [{"type": "integer"}, {"multipleOf": 3}]}, "#/anyOf/1"),
        ({"$defs": {"x": {"if": {}, "then": {}}}}, "#/$defs/x"),
        ({"items": {"format": "color"}}, "#/items/format"),
        ({"pattern": "a", "minLength": 2}, "#"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "#/allOf"),
        ({"additionalProperties": 3}, "#/additionalProperties"),
        ([], "#"),
        ({"$ref": "http://127.0.0.1/x"}, "#/$ref"),
        ({"$ref": "file:///etc/passwd"}, "#/$ref"),
        ({"items": {"$ref": "#name"}}, "#/items/$ref"),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"b": {}}}, "#/items/$ref"),
        ({"$ref": 5}, "#/$ref"),
        ({"items": {"$ref": "#/$defs/a", "minimum": 5}, "$defs": {"a": {"type": "integer"}}}, "#/items"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}], "type": "string"}, "#"),
        ({"oneOf": [{"required": []}], "properties": {"a": {}}}, "#"),
        ({"allOf": [{"type": "string"}], "maxLength": 1}, "#"),
        ({"enum": ["a", 1], "type": "string"}, "#"),
        ({"const": True, "type": "integer"}, "#"),
        ({"minimum": 5}, "#"),
        ({"properties": {"a": {"minLength": 3}}}, "#/properties/a"),
        ({"required": ["a"]}, "#/required"),
        ({"type": "object", "properties": {"b": {}}, "required": ["b", "a"]}, "#/required"),
        ({"properties": {"a": {"dependencies": {"b": ["c"]}}}}, "#/properties/a"),
    ],
)
def test_refused(schema: Any, pointer: str) -> None:
    with pytest.raises(GrammarError) as caught:
        check_schema(json.dumps(schema), "xgrammar")
    assert str(caught.value).startswith(f"JSON Schema at {pointer} ")


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"default": {"not": 1}, "examples": [{"multipleOf": 1}], "const": {"if": 2}},
        {"properties": {"not": {"type": "string"}, "if": {"type": "string", "format": "date"}}},
        {"allOf": [{"type": "object"}], "type": "object"},
        {"prefixItems": [{"type": "string", "minLength": 1, "maxLength": 3}], "items": False},
        {"items": {"$ref": "#/$defs/a~1b", "title": "x", "default": 5}, "$defs": {"a/b": {"type": "integer"}}},
        {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}], "type": ["string", "null"], "default": None},
        {"type": "string", "enum": ["a", "b"], "description": "x"},
        {"type": "number", "const": 5},
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]},
    ],
)
def test_accepted(schema: Any) -> None:
    assert check_schema(json.dumps(schema), "xgrammar") == schema


def test_depth_is_bounded() -> None:
    for depth in (MAX_DEPTH + 2, 100_000):
        text = '{"items":' * depth + "{}" + "}" * depth
        with pytest.raises(GrammarError, match=r"nested more than|not valid JSON"):
            check_schema(text, "xgrammar")


def test_the_older_structural_tag() -> None:
    tag = {"structures": [{"begin": "<a>", "end": "</a>"}], "triggers": ["<a"], "at_least_one": True}
    assert read_structural_tag(json.dumps(tag), "xgrammar") == {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<a"],
            "tags": [
                {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</a>"}
            ],
            "at_least_one": True,
        },
    }


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ([], "must be an object"),
        ({"structures": {}, "triggers": []}, "#/structures"),
        ({"structures": [], "triggers": [1]}, "#/triggers"),
        ({"structures": [{"begin": "a"}], "triggers": ["a"]}, "#/structures/0"),
        (
            {"type": "structural_tag", "format": {"elements": [{"json_schema": {"not": {}}}]}},
            "#/format/elements/0/json_schema ",
        ),
    ],
)
def test_refused_structural_tags(tag: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        read_structural_tag(json.dumps(tag), "xgrammar")
