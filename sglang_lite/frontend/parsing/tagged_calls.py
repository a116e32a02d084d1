"""Calls whose parameters are tagged one by one: GLM-4.5, Qwen3-Coder, MiMo, MiniMax-M2, Step-3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_lite.frontend.parsing.events import Collector
from sglang_lite.frontend.parsing.json_calls import MAX_HELD, text_before_call
from sglang_lite.frontend.parsing.parameter_types import (
    TEXT_ONLY,
    is_limited_text,
    limited_text,
    parameter_json,
    parameter_types,
)
from sglang_lite.frontend.parsing.source import (
    Malformed,
    Markers,
    Source,
    Steps,
    discard,
    require,
    skip_space,
    take,
    take_until,
    text_until,
)


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """``section call NAME name_end (key KEY key_end value VALUE value_end)* call_end ... section_end``.

    Attributes:
        section, section_end: around one or more calls; empty when the call's own markers do that.
        value: stands between the key and its value, if anything does.
        strict_values: a value ends with its own marker only; else with the next key or the end of the call too, which
            some models write without it.
        is_line: a value has lines of its own: the line ends around it are not part of it.
        untyped_is_text: a parameter without a type in the schema is text, else whatever it looks like.
    """

    call: str
    name_end: str
    key: str
    key_end: str
    value_end: str
    call_end: str
    section: str = ""
    section_end: str = ""
    value: str = ""
    strict_values: bool = False
    is_line: bool = False
    untyped_is_text: bool = False

    def parse(self, source: Source, out: Collector) -> Steps[None]:
        """Read the whole text."""
        outside = _markers(self.section, self.call)
        marker = yield from text_before_call(source, out, outside)
        while marker is not None:
            # A call without the outer markers ends with its own.
            end = self.section_end if self.section_end and marker == self.section else self.call_end
            while marker is not None and marker != end:
                if marker == self.call:
                    try:
                        marker = yield from self._read_call(source, out)
                        continue
                    except Malformed:
                        pass
                marker = yield from text_until(source, _markers(self.call, end), discard)
            if marker is not None:
                marker = yield from text_before_call(source, out, outside)

    def _read_call(self, source: Source, out: Collector) -> Steps[str | None]:
        """Read a call; returns the marker that ended it.

        Raises:
            Malformed: a name or a key is too long or the text ends in one.
        """
        structure = _markers(self.key, self.call_end, self.call, self.section_end)
        ends = _markers(self.name_end, self.key, self.call_end)
        yield from skip_space(source)
        name, marker = yield from take_until(source, ends)
        name = name.strip()
        if not name and marker == self.call_end:
            return marker
        if not name:
            raise Malformed
        out.start(name)
        out.arguments("{")
        schema = out.tools.schemas.get(name, {})
        found: str | None = marker
        if found == self.name_end:
            found = yield from text_until(source, structure, discard)
        separator = ""
        while found == self.key:
            key, _ = yield from take_until(source, Markers(self.key_end))
            key = key.strip()
            if self.value:
                yield from skip_space(source)
                yield from require(source, self.value)
            out.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            found = yield from self._read_value(source, out, schema, key)
            if found == self.value_end:
                found = yield from text_until(source, structure, discard)
        if found is not None:
            out.arguments("}")
        return found

    def _read_value(self, source: Source, out: Collector, schema: Mapping[str, Any], key: str) -> Steps[str | None]:
        types = parameter_types(schema, key)
        is_limited = types == TEXT_ONLY and is_limited_text(schema, key)
        ends = _markers(self.value_end) if self.strict_values else _markers(self.value_end, self.key, self.call_end)
        if self.is_line:
            yield from take(source, "\n")
        trim = 1 if self.is_line else 0
        if not is_limited and (types == TEXT_ONLY or (not types and self.untyped_is_text)):
            out.arguments('"')
            sink = partial(_put_quoted, out)
            found = yield from text_until(source, ends, sink, trim=trim, space="\n")
            if found is not None:
                out.arguments('"')
            return found
        text, end = yield from take_until(source, ends, MAX_HELD)
        if self.is_line:
            text = text.removesuffix("\n")
        if is_limited:
            text = limited_text(text, schema, key)
        out.arguments(parameter_json(text, types, untyped_is_text=self.untyped_is_text))
        return end


def _put_quoted(out: Collector, text: str) -> None:
    """Pass ``text`` on as the inside of a JSON string."""
    out.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _markers(*words: str) -> Markers:
    return Markers(*dict.fromkeys(word for word in words if word))


GLM45 = TaggedCalls(
    call="<tool_call>",
    name_end="\n",
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    call_end="</tool_call>",
    strict_values=True,
)
QWEN3_CODER = TaggedCalls(
    section="<tool_call>",
    call="<function=",
    name_end=">",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    call_end="</function>",
    section_end="</tool_call>",
    is_line=True,
    untyped_is_text=True,
)
MINIMAX_M2 = TaggedCalls(
    section="<minimax:tool_call>",
    call='<invoke name="',
    name_end='">',
    key='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    call_end="</invoke>",
    section_end="</minimax:tool_call>",
)
STEP3 = TaggedCalls(
    section="<｜tool_calls_begin｜>",
    call='<steptml:invoke name="',
    name_end='">',
    key='<steptml:parameter name="',
    key_end='">',
    value_end="</steptml:parameter>",
    call_end="</steptml:invoke>",
    section_end="<｜tool_calls_end｜>",
)
