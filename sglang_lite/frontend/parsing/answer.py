"""From the text of a model to its answer: reasoning, content and calls, whole or while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sglang_lite.frontend.parsing.events import (
    CallArguments,
    CallStart,
    Collector,
    Delta,
    ReasoningDelta,
    TextDelta,
    Toolset,
    joined,
)
from sglang_lite.frontend.parsing.formats import ToolFormat
from sglang_lite.frontend.parsing.reasoning import ReasoningFormat
from sglang_lite.frontend.parsing.source import Source, Steps, rest

Parse = Callable[[Source, Collector], Steps[None]]


class IncrementalParser:
    """Runs a format over text that arrives in pieces.

    Attributes:
        out: what it found.
    """

    def __init__(self, parse: Parse, tools: Toolset) -> None:
        self.out = Collector(tools)
        self._source = Source()
        self._steps = self._run(parse)

    def _run(self, parse: Parse) -> Steps[None]:
        yield from parse(self._source, self.out)
        yield from rest(self._source, self.out.text)

    def push(self, text: str) -> list[Delta]:
        """What ``text`` adds."""
        if text:
            self._source.feed(text)
            next(self._steps)
        return self.out.take()

    def finish(self) -> list[Delta]:
        """What the end of the text adds. Call it once; nothing may be pushed afterwards."""
        self._source.ended = True
        for _ in self._steps:
            raise RuntimeError("a format waits for text after the end")
        return self.out.take()


@dataclass(slots=True, frozen=True)
class Call:
    """A call: ``arguments`` is JSON text, cut off where the model's text was."""

    name: str
    arguments: str


@dataclass(slots=True, frozen=True)
class Answer:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class AnswerFormat:
    """How the text of a request is read.

    Attributes:
        reasoning: None to leave reasoning in the content.
        begins_inside: the text begins inside the reasoning.
        stream_reasoning: pass reasoning on while it comes, not only when it is complete.
        calls: None to leave calls in the content.
        tools: the functions that may be called.
        first_call: calls that the conversation already has.
    """

    reasoning: ReasoningFormat | None = None
    begins_inside: bool = False
    stream_reasoning: bool = True
    calls: ToolFormat | None = None
    tools: Toolset = field(default_factory=Toolset)
    first_call: int = 0

    def call_id(self, name: str, index: int) -> str:
        """Id of call ``index`` of the answer."""
        return "" if self.calls is None else self.calls.call_id(name, self.first_call + index)


class AnswerParser:
    """Reads one answer: reasoning first, calls in what is left."""

    def __init__(self, how: AnswerFormat) -> None:
        self._stream_reasoning = how.stream_reasoning
        self._held: list[Delta] = []
        self._calls = None if how.calls is None else IncrementalParser(how.calls.parse, how.tools)
        self._reasoning: IncrementalParser | None = None
        form = how.reasoning
        if form is not None:
            inside = how.begins_inside

            def parse(source: Source, out: Collector) -> Steps[None]:
                yield from form.parse(source, out, inside=inside)

            self._reasoning = IncrementalParser(parse, Toolset())

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(start, end) offsets of the blocks of reasoning that are complete, markers included."""
        return [] if self._reasoning is None else self._reasoning.out.spans

    def push(self, text: str) -> list[Delta]:
        """What ``text`` adds to the answer."""
        first: list[Delta] = [TextDelta(text)] if text else []
        return self._second(first if self._reasoning is None else self._reasoning.push(text))

    def finish(self) -> list[Delta]:
        """What the end of the text adds. Call it once; nothing may be pushed afterwards."""
        found = self._second([] if self._reasoning is None else self._reasoning.finish())
        if self._calls is not None:
            found += self._calls.finish()
        held, self._held = self._held, []
        return joined(held + found)

    def _second(self, deltas: list[Delta]) -> list[Delta]:
        found: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                (found if self._stream_reasoning else self._held).append(delta)
                continue
            if self._held:
                found += self._held
                self._held = []
            if isinstance(delta, TextDelta) and self._calls is not None:
                found += self._calls.push(delta.text)
            else:
                found.append(delta)
        return joined(found)


def collect(deltas: Iterable[Delta]) -> Answer:
    """The answer that ``deltas`` make."""
    content: list[str] = []
    reasoning: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        match delta:
            case TextDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case CallStart(_, name):
                names.append(name)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    calls = [Call(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True)]
    return Answer("".join(content), "".join(reasoning), calls)


def parse_answer(text: str, how: AnswerFormat) -> Answer:
    """Read a whole text."""
    parser = AnswerParser(how)
    return collect([*parser.push(text), *parser.finish()])
