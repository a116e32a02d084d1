"""Calls written as JSON objects ``{"name": ..., "arguments": {...}}``, and the formats that wrap them in markers."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass

from sglang_lite.frontend.parsing.events import Collector
from sglang_lite.frontend.parsing.source import (
    MAX_NAME,
    MAX_TRIMMED,
    Malformed,
    Markers,
    Source,
    Steps,
    discard,
    peek,
    require,
    rest,
    skip_space,
    take,
    take_until,
    text_until,
)
from sglang_lite.frontend.parsing.values import is_unicode, read_value, value_of

MAX_HELD = 2**20
"""Characters of arguments that may come before the name they belong to."""

_ARGUMENTS = ("arguments", "parameters")
_LEAD_SPACE = 64


def text_before_call(source: Source, out: Collector, markers: Markers) -> Steps[str | None]:
    """Pass on the answer's text up to a marker of calls, without the white space that sets calls off.

    Returns:
        The marker, None at the end of the text.
    """
    if out.seen_call and not out.has_text:
        yield from skip_space(source)
    keep = not out.seen_call
    marker = yield from text_until(source, markers, out.text, trim=MAX_TRIMMED, keep_last_space=keep)
    out.seen_call = out.seen_call or marker is not None
    return marker


def read_string(source: Source, limit: int = MAX_NAME) -> Steps[str]:
    """A JSON string.

    Raises:
        Malformed: something else comes next.
    """
    if (yield from peek(source)) != '"':
        raise Malformed
    parts: list[str] = []
    yield from read_value(source, parts.append, limit=limit)
    text: str = json.loads("".join(parts))
    return text


def read_object(source: Source, out: Collector, name: str) -> Steps[None]:
    """A call of ``name`` whose arguments, an object, come next.

    Raises:
        Malformed: no object comes next, or it is broken. The call stays with what was good of it.
    """
    yield from skip_space(source)
    if (yield from peek(source)) != "{":
        raise Malformed
    out.start(name)
    yield from read_value(source, out.arguments)


class _Call:
    """A call that may still lack its name or its arguments."""

    def __init__(self, out: Collector) -> None:
        self._out = out
        self._held: list[str] | None = None
        self._name: str | None = None
        self.has_arguments = False

    def named(self, name: str) -> None:
        if self._name is not None:
            return
        self._name = name
        if self._held is not None:
            self._out.start(name)
            self._out.arguments("".join(self._held))
            self._held = None

    def read_arguments(self, source: Source) -> Steps[None]:
        self.has_arguments = True
        first = yield from peek(source)
        if self._name is not None and first == "{":
            yield from read_object(source, self._out, self._name)
            return
        held: list[str] = []
        yield from read_value(source, held.append, limit=MAX_HELD)
        text = _object_text("".join(held))
        if self._name is None:
            self._held = [text]
        else:
            self._out.start(self._name)
            self._out.arguments(text)

    def close(self) -> None:
        if self._name is None:
            raise Malformed
        if not self.has_arguments:
            self._out.start(self._name)
            self._out.arguments("{}")


def _object_text(text: str) -> str:
    """The object that arguments stand for: themselves, none for null, or the one that a string quotes.

    Raises:
        Malformed: it is none.
    """
    if text == "null":
        return "{}"
    if text.startswith('"'):
        text = value_of(json.loads(text).strip()) or ""
    if not text.startswith("{") or not is_unicode(text):
        raise Malformed
    return text


def read_call(source: Source, out: Collector) -> Steps[None]:
    """A call as an object.

    Raises:
        Malformed: it is broken. Nothing was found before its arguments began.
    """
    yield from skip_space(source)
    yield from require(source, "{")
    call, is_first = _Call(out), True
    while True:
        yield from skip_space(source)
        if (yield from take(source, "}")):
            break
        if not is_first:
            yield from require(source, ",")
            yield from skip_space(source)
        is_first = False
        key = yield from read_string(source)
        yield from skip_space(source)
        yield from require(source, ":")
        yield from skip_space(source)
        if key == "name":
            call.named((yield from read_string(source)))
        elif key in _ARGUMENTS and not call.has_arguments:
            yield from call.read_arguments(source)
        else:
            yield from read_value(source, discard)
    call.close()


def read_calls(source: Source, out: Collector) -> Steps[None]:
    """One call, or an array of them.

    Raises:
        Malformed: one is broken; those before it count.
    """
    yield from skip_space(source)
    if not (yield from take(source, "[")):
        yield from read_call(source, out)
        return
    yield from skip_space(source)
    if (yield from take(source, "]")):
        return
    while True:
        yield from read_call(source, out)
        yield from skip_space(source)
        if (yield from take(source, "]")):
            return
        yield from require(source, ",")


def calls_only(source: Source, out: Collector) -> Steps[None]:
    """The whole text is one array of calls, as a grammar makes it for ``tool_choice`` required."""
    with suppress(Malformed):
        yield from read_calls(source, out)
    yield from rest(source, discard)


@dataclass(frozen=True, slots=True)
class TaggedJson:
    """JSON between an opening and a closing marker: Hermes, Qwen, InternLM.

    What is broken is left out up to the closing marker, or to the next opening one.
    """

    opening: str
    closing: str

    def parse(self, source: Source, out: Collector) -> Steps[None]:
        """Read the whole text."""
        opening, either = Markers(self.opening), Markers(self.opening, self.closing)
        marker = yield from text_before_call(source, out, opening)
        while marker is not None:
            with suppress(Malformed):
                yield from read_calls(source, out)
            marker = yield from text_until(source, either, discard)
            if marker == self.closing:
                marker = yield from text_before_call(source, out, opening)


_PYTHON_TAG = Markers("<|python_tag|>")


def _is_bare_call(source: Source, out: Collector) -> Steps[bool]:
    """Whether the text begins with an object that says it is a call of a declared function. Consumes nothing."""
    source.mark()
    try:
        yield from skip_space(source, _LEAD_SPACE)
        yield from require(source, "{")
        name = ""
        while True:
            yield from skip_space(source, _LEAD_SPACE)
            key = yield from read_string(source, 32)
            yield from skip_space(source, _LEAD_SPACE)
            yield from require(source, ":")
            if key in _ARGUMENTS:
                return name in out.tools.schemas
            if key not in ("name", "type") or (key == "name" and name):
                return False
            yield from skip_space(source, _LEAD_SPACE)
            value = yield from read_string(source)
            name = value if key == "name" else name
            yield from skip_space(source, _LEAD_SPACE)
            yield from require(source, ",")
    except Malformed:
        return False
    finally:
        source.rewind()


def llama3(source: Source, out: Collector) -> Steps[None]:
    """``<|python_tag|>{...}``, several joined by ``;``, or the bare object as the beginning of the text."""
    is_call = yield from _is_bare_call(source, out)
    while True:
        if not is_call and (yield from text_before_call(source, out, _PYTHON_TAG)) is None:
            return
        is_call = True
        while is_call:
            try:
                yield from read_call(source, out)
            except Malformed:
                is_call = (yield from text_until(source, _PYTHON_TAG, discard)) is not None
            else:
                yield from skip_space(source)
                is_call = yield from take(source, ";")


_MISTRAL, _MISTRAL_NAME = Markers("[TOOL_CALLS]"), Markers("[ARGS]", "[CALL_ID]")
_MISTRAL_ARGUMENTS = Markers("[ARGS]")


def mistral(source: Source, out: Collector) -> Steps[None]:
    """``[TOOL_CALLS] [{...}, ...]`` and ``[TOOL_CALLS]name[ARGS]{...}``."""
    marker = yield from text_before_call(source, out, _MISTRAL)
    while marker is not None:
        try:
            yield from skip_space(source)
            if (yield from peek(source)) in ("[", "{"):
                yield from read_calls(source, out)
            else:
                name, end = yield from take_until(source, _MISTRAL_NAME)
                if end == "[CALL_ID]":
                    yield from take_until(source, _MISTRAL_ARGUMENTS)
                yield from read_object(source, out, name.strip())
        except Malformed:
            marker = yield from text_until(source, _MISTRAL, discard)
        else:
            marker = yield from text_before_call(source, out, _MISTRAL)
