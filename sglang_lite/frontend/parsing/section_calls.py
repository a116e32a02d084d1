"""Calls in a marked section, each with a marked header that names the function and a JSON object: DeepSeek, Kimi."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from sglang_lite.frontend.parsing.events import Collector
from sglang_lite.frontend.parsing.json_calls import read_object, text_before_call
from sglang_lite.frontend.parsing.source import (
    Malformed,
    Markers,
    Source,
    Steps,
    discard,
    take_until,
    text_until,
)


@dataclass(frozen=True, slots=True)
class SectionCalls:
    """``begin (call header header_end {...} ...)* end``; what else is in a section is left out.

    Attributes:
        name: the function's name in a header.
    """

    begin: str
    call: str
    header_end: str
    end: str
    name: Callable[[str], str] = str.strip

    def parse(self, source: Source, out: Collector) -> Steps[None]:
        """Read the whole text."""
        # A call outside any section counts too: models forget the outer marker.
        outside, inside = Markers(self.begin, self.call), Markers(self.call, self.end)
        header_end = Markers(self.header_end)
        marker = yield from text_before_call(source, out, outside)
        while marker is not None:
            if marker == self.call:
                with suppress(Malformed):
                    header, _ = yield from take_until(source, header_end)
                    yield from read_object(source, out, self.name(header))
            if marker != self.end:
                marker = yield from text_until(source, inside, discard)
            else:
                marker = yield from text_before_call(source, out, outside)


def kimi_name(header: str) -> str:
    """``get_weather`` of ``functions.get_weather:0``."""
    name, colon, index = header.strip().removeprefix("functions.").rpartition(":")
    return name if colon and index.isdecimal() else header.strip().removeprefix("functions.")


DEEPSEEK_V3 = SectionCalls(
    begin="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>",
    header_end="```json",
    end="<｜tool▁calls▁end｜>",
    name=lambda header: header.rpartition("<｜tool▁sep｜>")[2].strip(),
)
DEEPSEEK_V31 = SectionCalls(
    begin="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>",
    header_end="<｜tool▁sep｜>",
    end="<｜tool▁calls▁end｜>",
)
KIMI_K2 = SectionCalls(
    begin="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    header_end="<|tool_call_argument_begin|>",
    end="<|tool_calls_section_end|>",
    name=kimi_name,
)
