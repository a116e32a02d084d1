"""Calls written as a Python list: ``[get_weather(city="Paris", n=2), f2()]``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from sglang_lite.frontend.parsing.events import Collector
from sglang_lite.frontend.parsing.source import (
    MAX_TRIMMED,
    Malformed,
    Markers,
    Source,
    Steps,
    discard,
    require,
    rest,
    skip_space,
    take,
    take_name,
    text_until,
)
from sglang_lite.frontend.parsing.values import read_value

_NAME = re.compile(r"[A-Za-z0-9_.\-]*", re.ASCII)
_LEAD_SPACE = 64


@dataclass(frozen=True, slots=True)
class PythonicCalls:
    """A list of calls whose first one names a declared function; any other bracket is text.

    Attributes:
        ignored: markers that are left out wherever they stand.
    """

    ignored: tuple[str, ...] = ()

    def parse(self, source: Source, out: Collector) -> Steps[None]:
        """Read the whole text."""
        markers = Markers("[", *self.ignored)
        while True:
            marker = yield from text_until(source, markers, out.text, trim=MAX_TRIMMED)
            if marker is None:
                return
            if marker != "[":
                continue
            before = source.trimmed
            if not (yield from _is_call(source, out)):
                out.text(f"{before}[")
                continue
            try:
                yield from _read_list(source, out)
            except Malformed:
                yield from rest(source, discard)
            if not out.has_text:
                yield from skip_space(source)


def _is_call(source: Source, out: Collector) -> Steps[bool]:
    """Whether a call of a declared function follows. Consumes nothing."""
    source.mark()
    try:
        yield from skip_space(source, _LEAD_SPACE)
        name = yield from take_name(source, _NAME)
        return name in out.tools.schemas and (yield from take(source, "("))
    except Malformed:
        return False
    finally:
        source.rewind()


def _read_list(source: Source, out: Collector) -> Steps[None]:
    """The calls up to the closing bracket.

    Raises:
        Malformed: something is not a call with keyword arguments that are literals.
    """
    while True:
        yield from skip_space(source)
        name = yield from take_name(source, _NAME)
        yield from require(source, "(")
        out.start(name)
        yield from _read_arguments(source, out)
        yield from skip_space(source)
        if (yield from take(source, "]")):
            return
        yield from require(source, ",")


def _read_arguments(source: Source, out: Collector) -> Steps[None]:
    out.arguments("{")
    separator = ""
    while True:
        yield from skip_space(source)
        if (yield from take(source, ")")):
            out.arguments("}")
            return
        if separator:
            yield from require(source, ",")
            yield from skip_space(source)
            if (yield from take(source, ")")):
                out.arguments("}")
                return
        key = yield from take_name(source, _NAME)
        yield from skip_space(source)
        yield from require(source, "=")
        out.arguments(f"{separator}{json.dumps(key)}: ")
        separator = ", "
        yield from read_value(source, out.arguments, python=True)


PYTHONIC = PythonicCalls(ignored=("<|python_start|>", "<|python_end|>"))
LFM2 = PythonicCalls(ignored=("<|tool_call_start|>", "<|tool_call_end|>"))
