"""What a parser finds does not depend on how the text is cut (acceptance B15, B16)."""

from __future__ import annotations

import json
import time
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.frontend.parsing.answer import Answer, AnswerFormat, AnswerParser, collect, parse_answer
from sglang_lite.frontend.parsing.events import CallStart, Toolset
from sglang_lite.frontend.parsing.formats import CALLS_ONLY, TOOL_FORMATS, ToolFormat
from sglang_lite.frontend.parsing.reasoning import REASONING_FORMATS
from sglang_lite.frontend.parsing.values import ValueScanner
from tests.support.call_texts import SCHEMAS, WRITERS, write_calls

TOOLS = Toolset(SCHEMAS)
FORMATS = {form: name for name, form in reversed({**TOOL_FORMATS, "calls-only": CALLS_ONLY}.items())}
"""Every format once, by one of its names."""
REASONING = {
    name: REASONING_FORMATS[name] for name in ("deepseek-r1", "qwen3", "kimi", "kimi_k2", "mistral", "gpt-oss")
}

STRINGS = st.one_of(
    st.text(alphabet="aé🙂 \"'\\\n\t{}[]<>|/,:=", max_size=8),
    st.sampled_from(
        ["</tool_call>", "<|call|>", "<｜tool▁calls▁end｜>", "]", ")", "\u00e9", "1", "true", "null", "</x>"]
    ),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6, width=32) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("f"), st.dictionaries(st.sampled_from(["text", "count", "data"]), st.none(), max_size=3)),
        st.tuples(st.just("g"), st.just({})),
    ),
    max_size=3,
)


def fill(calls: list[tuple[str, dict[str, None]]], data: st.DataObject) -> list[tuple[str, dict[str, Any]]]:
    """Values of the types that the schemas say."""
    kinds: dict[str, st.SearchStrategy[Any]] = {"text": STRINGS, "count": st.integers(-9, 99), "data": VALUES}
    kinds["data"] = st.dictionaries(STRINGS, VALUES, max_size=2)
    return [(name, {key: data.draw(kinds[key]) for key in arguments}) for name, arguments in calls]


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in pairwise([0, *places, len(text)])]


def streamed(pieces: list[str], how: AnswerFormat) -> Answer:
    parser = AnswerParser(how)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    starts = [delta.index for delta in deltas if isinstance(delta, CallStart)]
    assert starts == list(range(len(starts)))
    return collect(deltas)


def check_cuts(text: str, how: AnswerFormat, data: st.DataObject) -> Answer:
    whole = parse_answer(text, how)
    assert streamed(list(text), how) == whole
    size = data.draw(st.integers(2, 7))
    assert streamed([text[at : at + size] for at in range(0, len(text), size)], how) == whole
    assert streamed(cut(text, data), how) == whole
    return whole


@pytest.mark.parametrize("name", sorted(WRITERS))
@settings(max_examples=25, deadline=None)
@given(calls=CALLS, before=st.sampled_from(["", "see", "a [1] {b}\n"]), data=st.data())
def test_well_formed_calls_are_found(name: str, calls: Any, before: str, data: st.DataObject) -> None:
    """B15"""
    filled = fill(calls, data)
    if name in ("llama3", "pythonic") and not filled:
        return
    text = before + write_calls(name, filled)
    answer = check_cuts(text, AnswerFormat(calls=TOOL_FORMATS[name], tools=TOOLS), data)
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == filled
    assert answer.content.strip() == before.strip()


@pytest.mark.parametrize("name", sorted(WRITERS))
@pytest.mark.parametrize("between", ["", "\n", " and then ", "<"])
@pytest.mark.parametrize("around", [("", ""), ("before ", " after"), ("a [1] {b}\n", "\n</tool_call>")])
def test_text_around_calls_is_read_alike_in_pieces_of_every_size(
    name: str, between: str, around: tuple[str, str]
) -> None:
    """B15: the same function twice, no arguments, nested ones, the end marker and an escape in a string."""
    calls: list[tuple[str, dict[str, Any]]] = [
        ("f", {"text": 'x</tool_call> "é" \\u00e9', "count": 2}),
        ("g", {}),
        ("f", {"data": {"a": {"b": [1, {"c": "]"}]}}}),
    ]
    text = around[0] + between.join(write_calls(name, [call]) for call in calls) + around[1]
    how = AnswerFormat(calls=TOOL_FORMATS[name], tools=TOOLS)
    whole = parse_answer(text, how)
    for size in range(1, 8):
        assert streamed([text[at : at + size] for at in range(0, len(text), size)], how) == whole
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls][:1] == calls[:1]


WORDS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_calls_section_end|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>",
    "<|call|>", "analysis", "final", "commentary to=functions.f", "<function=f>", "<parameter=text>", "</parameter>",
    "</function>", "[f(", "text=", "f", "g", "\n", " ", ";", ",", ":", "=", "(", ")", "[", "]", "{", "}", '"', "'",
    "\\",
    '{"name": "f"', '"arguments": {', '"parameters":', '{"text": "x"}', '"name": "g"', "12", "-", "true", "None", "é",
    "<think>", "</think>", "◁think▷", "◁/think▷", "[THINK]", "[/THINK]", "functions.f:0", "<", "<|", "</", "\\u00e9",
]  # fmt: skip
ADVERSARIAL = st.lists(st.sampled_from(WORDS), max_size=24).map("".join)


@pytest.mark.parametrize("form", FORMATS, ids=FORMATS.values())
@settings(max_examples=50, deadline=None)
@given(text=ADVERSARIAL, data=st.data())
def test_any_text_is_read_alike_however_it_is_cut(form: ToolFormat, text: str, data: st.DataObject) -> None:
    """B15"""
    check_cuts(text, AnswerFormat(calls=form, tools=TOOLS), data)


@pytest.mark.parametrize("name", sorted(WRITERS))
@settings(max_examples=25, deadline=None)
@given(calls=CALLS, data=st.data())
def test_damaged_calls_are_read_alike_however_they_are_cut(name: str, calls: Any, data: st.DataObject) -> None:
    """B15"""
    text = write_calls(name, fill(calls, data))
    place = data.draw(st.integers(0, len(text)))
    kind = data.draw(st.sampled_from(["end", "insert", "remove"]))
    tail = {"end": "", "insert": data.draw(st.sampled_from(WORDS)) + text[place:], "remove": text[place + 1 :]}[kind]
    check_cuts(text[:place] + tail, AnswerFormat(calls=TOOL_FORMATS[name], tools=TOOLS), data)


@pytest.mark.parametrize("name", sorted(REASONING))
@settings(max_examples=60, deadline=None)
@given(text=ADVERSARIAL, inside=st.booleans(), stream=st.booleans(), data=st.data())
def test_reasoning_is_split_alike_however_it_is_cut(
    name: str, text: str, inside: bool, stream: bool, data: st.DataObject
) -> None:
    """B16"""
    calls = data.draw(st.sampled_from([None, *TOOL_FORMATS.values()]))
    form = REASONING[name]
    how = AnswerFormat(reasoning=form, begins_inside=inside, stream_reasoning=stream, calls=calls, tools=TOOLS)
    answer = check_cuts(text, how, data)
    both = AnswerFormat(reasoning=form, begins_inside=inside, stream_reasoning=not stream, calls=calls, tools=TOOLS)
    assert parse_answer(text, both) == answer


@settings(max_examples=200, deadline=None)
@given(value=VALUES, python=st.booleans(), data=st.data())
def test_values_come_out_as_json(value: Any, python: bool, data: st.DataObject) -> None:
    text = repr(value) if python else json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    scanner, out = ValueScanner(python=python), ""
    for piece in cut(text, data):
        at, found = scanner.scan(piece, 0, len(piece))
        assert at == len(piece) and not scanner.failed
        out += found
    last = scanner.finish()
    assert last is not None
    assert json.loads(out + last) == value


HARD = {
    "openings": "<tool_call>" * 1500,
    "headers": "<|start|><|channel|>" * 1000,
    "brackets": "[" * 10000,
    "depth": '<tool_call>{"name": "f", "arguments": ' + "[" * 10000,
    "string": '<tool_call>{"name": "f", "arguments": {"text": "' + "x" * 10000,
    "spaces": " " * 10000,
    "first-arguments": '<tool_call>{"arguments": {"text": "' + "x" * 10000,
    "value": "<tool_call>f\n<arg_key>data</arg_key><arg_value>" + "x" * 10000,
    "names": "<function=" + "x" * 10000,
    "calls": "[f(" * 4000,
}


@pytest.mark.parametrize("text", HARD.values(), ids=HARD)
def test_hostile_texts_take_linear_time_and_little_memory(text: str) -> None:
    """Each character alone: what is looked at again for every piece has to be bounded."""
    for form in FORMATS:
        parser = AnswerParser(AnswerFormat(calls=form, tools=TOOLS))
        start = time.process_time()
        for char in text:
            parser.push(char)
        parser.finish()
        assert time.process_time() - start < len(text) * 1e-4


def test_what_is_passed_on_is_not_kept() -> None:
    parser = AnswerParser(AnswerFormat(reasoning=REASONING["qwen3"], calls=TOOL_FORMATS["qwen"], tools=TOOLS))
    parser.push('<think>a</think><tool_call>{"name": "f", "arguments": {"text": "')
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(2000):
            parser.push("x" * 1000)
        assert tracemalloc.get_traced_memory()[0] - before < 50_000
    finally:
        tracemalloc.stop()
