"""Formats by example: what models really write, and where they go wrong."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from sglang_lite.frontend.parsing.answer import AnswerFormat, AnswerParser, parse_answer
from sglang_lite.frontend.parsing.detection import detect_reasoning_parser, detect_tool_parser
from sglang_lite.frontend.parsing.events import CallArguments, CallStart, Toolset
from sglang_lite.frontend.parsing.formats import CALLS_ONLY, TOOL_FORMATS
from sglang_lite.frontend.parsing.parameter_types import parameter_json, parameter_types
from sglang_lite.frontend.parsing.values import MAX_DEPTH, value_of

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = Toolset({"get_weather": WEATHER, "f2": {}})
PARIS = [("get_weather", {"city": "Paris"})]


def read(name: str, text: str, tools: Toolset = TOOLS) -> tuple[str, list[tuple[str, Any]]]:
    answer = parse_answer(text, AnswerFormat(calls=TOOL_FORMATS[name], tools=tools))
    return answer.content, [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>'),
        ("hermes", '<tool_call>[{"name": "get_weather", "arguments": {"city":"Paris",}}]</tool_call>'),
        ("llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}'),
        ("llama3", '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]'),
        ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'),
        ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"city": "Paris"}'),
        (
            "deepseekv3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁calls▁end｜>',
        ),
        (
            "deepseekv31",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            "glm",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        ),
        ("glm47", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
        ),
        (
            "gpt-oss",
            "<|start|>assistant<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>"
            '{"city": "Paris"}<|call|>',
        ),
        (
            "gpt-oss",
            '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}',
        ),
        ("pythonic", '[get_weather(city="Paris")]'),
        ("pythonic", "<|python_start|>[ get_weather( city = 'Paris', ) ]<|python_end|>"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        ),
        ("qwen3_coder", "<function=get_weather>\n<parameter=city>\nParis\n</function>"),
        (
            "mimo",
            "<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</tool_call>",
        ),
        (
            "minimax-m2",
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
            "</minimax:tool_call>",
        ),
        (
            "step3",
            '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
            '<steptml:parameter name="city">Paris</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
            "<｜tool_calls_end｜>",
        ),
        (
            "interns1",
            '<|action_start|> <|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>',
        ),
        ("lfm2", '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>'),
    ],
)
def test_calls_as_models_write_them(name: str, text: str) -> None:
    assert read(name, text) == ("", PARIS)
    assert read(name, f"see:\n{text}") == ("see:", PARIS) or text.startswith("{")


@pytest.mark.parametrize(
    ("name", "text", "content", "names"),
    [
        ("hermes", "<tool_call>{broken</tool_call> then", " then", []),
        ("hermes", '<tool_call>{"name": "no", "arguments": {}}</tool_call>', "", []),
        ("hermes", '<tool_call>{broken <tool_call>{"name": "f2"}</tool_call>', "", ["f2"]),
        ("hermes", '<tool_call>{"name": "f2"', "", []),
        ("hermes", "a <tool", "a <tool", []),
        ("llama3", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("llama3", '{"name": "no", "parameters": {}}', '{"name": "no", "parameters": {}}', []),
        ("llama3", "<|python_tag|>print(1)", "", []),
        ("pythonic", "[1, 2] and [f2]", "[1, 2] and [f2]", []),
        ("pythonic", "[f2(), f2(1)]", "", ["f2", "f2"]),
        ("mistral", "[TOOL_CALLS] what", "", []),
        ("kimi_k2", "<|tool_call_begin|>functions.f2:3<|tool_call_argument_begin|>{}", "", ["f2"]),
        ("glm45", "<tool_call></tool_call>ok", "ok", []),
        ("gpt-oss", "<|channel|>final<|message|>hi", "<|channel|>final<|message|>hi", []),
    ],
)
def test_texts_that_are_not_quite_calls(name: str, text: str, content: str, names: list[str]) -> None:
    answer = parse_answer(text, AnswerFormat(calls=TOOL_FORMATS[name], tools=TOOLS))
    assert (answer.content.strip(), [call.name for call in answer.calls]) == (content.strip(), names)


def test_a_dropped_call_is_logged_shortly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read("hermes", f'<tool_call>{{"name": "{"x" * 400}", "arguments": {{}}}}</tool_call>')
    [record] = caplog.records
    assert "undeclared" in record.getMessage() and len(record.getMessage()) < 200


def test_arguments_are_passed_on_while_they_come() -> None:
    parser = AnswerParser(AnswerFormat(calls=TOOL_FORMATS["qwen"], tools=TOOLS))
    assert parser.push('<tool_call>{"name": "get_weather", ') == []
    assert parser.push('"arguments":{"ci') == [CallStart(0, "get_weather"), CallArguments(0, '{"ci')]
    assert parser.push('ty":"Par') == [CallArguments(0, 'ty": "Par')]
    assert parser.push('is"}}') == [CallArguments(0, 'is"}')]
    assert [*parser.push("</tool_call>"), *parser.finish()] == []


def test_text_is_held_back_only_while_it_could_be_a_marker() -> None:
    parser = AnswerParser(AnswerFormat(calls=TOOL_FORMATS["qwen"], tools=TOOLS))
    shown = ["".join(getattr(delta, "text", "") for delta in parser.push(piece)) for piece in ("a <", "to", "p>", " ")]
    assert shown == ["a", "", " <top>", ""]
    assert [getattr(delta, "text", "") for delta in parser.finish()] == [" "]


def test_an_array_of_calls_is_the_whole_text() -> None:
    text = '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "f2", "parameters": {}}]'
    answer = parse_answer(text, AnswerFormat(calls=CALLS_ONLY, tools=TOOLS))
    assert [call.name for call in answer.calls] == ["get_weather", "f2"] and answer.content == ""


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "12", '"12"'),
        ({"type": "integer"}, " 12\n", "12"),
        ({"type": "integer"}, "1" * 5000, '"' + "1" * 5000 + '"'),
        ({"type": "integer"}, "twelve", '"twelve"'),
        ({"type": "number"}, "3", "3"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "object"}, "{'a': [1, None]}", '{"a": [1, null]}'),
        ({"type": "array"}, '["a"]', '["a"]'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", "5"),
        ({"enum": [1, 2]}, "2", "2"),
        ({"enum": ["a", "2"]}, "2", '"2"'),
        ({}, "{}", "{}"),
        ({}, "free text", '"free text"'),
        ({"type": "number"}, "NaN", '"NaN"'),
    ],
)
def test_parameters_get_the_type_of_the_schema(schema: dict[str, Any], text: str, expected: str) -> None:
    types = parameter_types({"properties": {"x": schema}}, "x")
    assert parameter_json(text, types, untyped_is_text=False) == expected


def test_parameters_without_a_type() -> None:
    assert parameter_types({"properties": 3}, "x") == frozenset()
    assert parameter_json("5", frozenset(), untyped_is_text=True) == '"5"'


@pytest.mark.parametrize(
    ("text", "python", "expected"),
    [
        ('{"a" :[ 1,2 ,{ }] }', False, '{"a": [1, 2, {}]}'),
        ('"a\nb\\d"', False, '"a\\nb\\\\d"'),
        ("'it\\'s \"x\" \\x41 \\U0001F642'", True, '"it\'s \\"x\\" \\u0041 🙂"'),
        ("(1, -2.5e3)", True, "[1, -2.5e3]"),
        ("'a'", False, None),
        ("01", False, None),
        ("NaN", False, None),
        ('{"a"}', False, None),
        ('{"a": }', False, None),
        ("[1 2]", False, None),
        ('"\\u00zz"', False, None),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), False, None),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, False, "[" * MAX_DEPTH + "]" * MAX_DEPTH),
        ("1 2", False, None),
        ("", False, None),
    ],
)
def test_values(text: str, python: bool, expected: str | None) -> None:
    assert value_of(text, python=python) == expected


@pytest.mark.parametrize(
    ("template", "tool", "reasoning"),
    [
        ("<tool_call> {% if enable_thinking %}<think>", "hermes", "qwen3"),
        ("<tool_call>\n<function=example>", "qwen3_coder", None),
        ("<｜Assistant｜> <｜tool▁sep｜> ```json </think>", "deepseekv3", "deepseek-r1"),
        ("<｜Assistant｜> <｜tool▁sep｜> thinking </think>", "deepseekv31", "deepseek-v3"),
        ("<|channel|>", "gpt-oss", "gpt-oss"),
        ("[INST] [TOOL_CALLS]", "mistral", None),
        ("plain", None, None),
    ],
)
def test_detection(template: str, tool: str | None, reasoning: str | None) -> None:
    assert (detect_tool_parser(template), detect_reasoning_parser(template)) == (tool, reasoning)
