"""Which grammar the tools of a request ask for, by ``tool_choice``, ``strict``, format and library."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_lite.frontend.parsing.call_syntax import HERMES
from sglang_lite.frontend.parsing.formats import CALLS_ONLY, TOOL_FORMATS
from sglang_lite.frontend.tool_choice import read_tool_choice
from sglang_lite.server.call_grammar import CallGrammar, call_grammar
from sglang_lite.types import Grammar, RequestError

LIMITED = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
NAMED = {"type": "function", "function": {"name": "b"}}


def tools(strict: Any = None, parameters: dict[str, Any] = LIMITED, name: str = "a") -> list[dict[str, Any]]:
    first = {"name": name, "parameters": parameters, **({} if strict is None else {"strict": strict})}
    return [{"type": "function", "function": function} for function in (first, {"name": "b"})]


def chosen(
    parser: str | None = "hermes", backend: str | None = "xgrammar", known: Any = (), **body: Any
) -> CallGrammar:
    tokenizer: Any = SimpleNamespace(token_to_id=dict.fromkeys(known, 5).get)
    return call_grammar(read_tool_choice(body), parser, backend, tokenizer)


def form(found: CallGrammar) -> Any:
    assert found.grammar is not None and found.grammar.kind == "structural_tag"
    return json.loads(found.grammar.text)["format"]


def test_a_free_choice_is_free_without_strict() -> None:
    for strict in (None, False):
        assert chosen(tools=tools(strict)) == CallGrammar(TOOL_FORMATS["hermes"])


def test_strict_enforces_the_schema_of_its_function_alone() -> None:
    found = chosen(tools=tools(True))
    assert (found.calls, found.covers_all) == (TOOL_FORMATS["hermes"], False)
    shape = form(found)
    assert (shape["triggers"], shape["at_least_one"], shape["stop_after_first"]) == (["<tool_call>"], False, False)
    first, second = shape["tags"]
    assert first["begin"] == '<tool_call>\n{"name": "a", "arguments": '
    assert (first["content"]["json_schema"], second["content"]["json_schema"]) == (LIMITED, {"type": "object"})
    assert first["end"] == HERMES.end
    assert form(chosen(tools=tools(True), parallel_tool_calls=False))["stop_after_first"] is True


@pytest.mark.parametrize(("choice", "names"), [("required", ["a", "b"]), (NAMED, ["b"])])
def test_forced_calls_have_the_form_of_the_parser(choice: Any, names: list[str]) -> None:
    found = chosen(tools=tools(), tool_choice=choice)
    assert (found.calls, found.covers_all) == (TOOL_FORMATS["hermes"], True)
    shape = form(found)
    assert [tag["begin"].split('"')[3] for tag in shape["tags"]] == names
    assert (shape["at_least_one"], shape["stop_after_first"]) == (True, choice != "required")


@pytest.mark.parametrize(
    "options", [{"parser": None}, {"parser": "pythonic"}, {"backend": "llguidance"}, {"backend": "none"}]
)
def test_json_where_no_tag_can_say_it(options: dict[str, Any]) -> None:
    found = chosen(tools=tools(), tool_choice="required", **options)
    assert (found.calls, found.covers_all) == (CALLS_ONLY, True)
    assert found.grammar is not None
    assert (found.grammar.kind, found.grammar.compact) == ("json_schema", True)
    free = chosen(tools=tools(True), **options)
    assert free.grammar is None


def test_names_that_a_tagged_format_cannot_hold_are_written_as_json() -> None:
    odd = tools(name="a>b")
    assert chosen("qwen3_coder", tools=odd, tool_choice="required").calls is CALLS_ONLY
    assert chosen("hermes", tools=odd, tool_choice="required").calls is TOOL_FORMATS["hermes"]


def test_the_form_of_calls_that_the_tokenizer_knows() -> None:
    old, new = (chosen("mistral", known=known, tools=tools(), tool_choice="required") for known in ((), ("[ARGS]",)))
    assert form(old)["begin"] == "[TOOL_CALLS] ["
    assert form(new)["tags"][0]["begin"] == "[TOOL_CALLS]a[ARGS]"


def test_a_schema_that_cannot_be_enforced_is_named() -> None:
    bad = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 2}}}
    with pytest.raises(RequestError, match=r"tools/0/function/parameters/properties/n .*multipleOf") as caught:
        chosen(tools=tools(True, bad))
    assert caught.value.field == "tools"
    assert chosen(tools=tools(False, bad)).grammar is None
    with pytest.raises(RequestError, match=r"tools\[0\]\.function\.strict"):
        chosen(tools=tools("yes"))


def test_another_spacing_is_another_grammar() -> None:
    assert Grammar("json_schema", "{}", compact=True) != Grammar("json_schema", "{}")
