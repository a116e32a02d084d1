"""The harmony format of gpt-oss: messages in channels, ``<|channel|>NAME to=RECIPIENT<|message|>BODY<|end|>``.

The reasoning stage takes the markers off and leaves messages to a recipient as they are; the stage of calls reads
those.
"""

from __future__ import annotations

import re
from contextlib import suppress

from sglang_lite.frontend.parsing.events import Collector
from sglang_lite.frontend.parsing.json_calls import read_object
from sglang_lite.frontend.parsing.source import (
    MAX_TRIMMED,
    Malformed,
    Markers,
    Source,
    Steps,
    discard,
    skip_space,
    take_until,
    text_until,
)

_HEADERS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADER = Markers(*_HEADERS)
_HEADER_END = Markers("<|message|>", "<|start|>", *_ENDS)
_ANY = Markers(*_HEADERS, *_ENDS)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def _read_header(source: Source, marker: str) -> Steps[tuple[str, str]]:
    """A header that began with ``marker``: what it says, and the marker after it, empty when it is no header.

    The header holds its own markers, so that it can be shown as it came.
    """
    source.mark()
    try:
        header, end = yield from take_until(source, _HEADER_END)
    except Malformed:
        source.rewind()
        return marker, ""
    finally:
        source.release()
    return marker + header, end


def harmony_calls(source: Source, out: Collector) -> Steps[None]:
    """Calls are messages to ``functions.NAME``; everything else is passed on as it is."""
    marker = yield from text_until(source, _HEADER, out.text, trim=MAX_TRIMMED)
    while marker is not None:
        before = source.trimmed
        header, end = yield from _read_header(source, marker)
        recipient = _RECIPIENT.search(header)
        if end == "<|message|>" and recipient is not None:
            with suppress(Malformed):
                yield from read_object(source, out, recipient[1])
            marker = yield from text_until(source, _ANY, discard)
            if marker in _HEADERS:
                continue
            if not out.has_text:
                yield from skip_space(source)
        else:
            out.text(before + header)
            if end == "<|start|>":
                marker = end
                source.trimmed = ""
                continue
            out.text(end)
        marker = yield from text_until(source, _HEADER, out.text, trim=MAX_TRIMMED)


def harmony_reasoning(source: Source, out: Collector) -> Steps[None]:
    """The channel ``analysis`` is reasoning, the others are the answer, without their markers.

    Text before the first header is the answer: it has no channel.
    """
    sink, is_call, start = out.text, False, 0
    while True:
        marker = yield from text_until(source, _ANY, sink)
        if sink == out.reasoning:
            out.spans.append((start, source.offset))
        if marker is None:
            return
        if marker in _HEADERS:
            start = source.offset - len(marker)
            header, end = yield from _read_header(source, marker)
            if is_call or _RECIPIENT.search(header):
                is_call, sink = True, out.text
                out.text(header + end)
            elif end == "<|message|>":
                sink = out.reasoning if "analysis" in header else out.text
            else:
                sink = out.text
            continue
        if is_call:
            out.text(marker)
        sink, is_call = out.text, False
