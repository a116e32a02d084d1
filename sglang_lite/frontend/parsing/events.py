"""What a parser finds, piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_lite.frontend.fields import shorten

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class TextDelta:
    """More of the answer."""

    text: str


@dataclass(slots=True, frozen=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(slots=True, frozen=True)
class CallStart:
    """A call of a declared function; ``index`` counts the calls of the answer from 0."""

    index: int
    name: str


@dataclass(slots=True, frozen=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = TextDelta | ReasoningDelta | CallStart | CallArguments


@dataclass(slots=True, frozen=True)
class Toolset:
    """The functions that may be called.

    Attributes:
        schemas: JSON schema of the parameters by name, empty where none was given.
        parallel: several calls may be made.
    """

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parallel: bool = True


class Collector:
    """Where a format puts what it finds.

    A call of an undeclared function, or a further one where only one is allowed, is dropped with a warning.

    Attributes:
        tools: the functions that may be called.
        has_text: some of the answer was found.
        seen_call: a marker of calls was found, whatever became of the call.
        spans: (start, end) offsets in the text of the blocks of reasoning, markers included.
    """

    def __init__(self, tools: Toolset) -> None:
        self.tools = tools
        self.spans: list[tuple[int, int]] = []
        self.has_text = False
        self.seen_call = False
        self._deltas: list[Delta] = []
        self._calls = 0
        self._is_open = False

    def text(self, text: str) -> None:
        """More of the answer."""
        if text:
            self.has_text = True
            self._deltas.append(TextDelta(text))

    def reasoning(self, text: str) -> None:
        """More of the reasoning."""
        self._deltas.append(ReasoningDelta(text))

    def start(self, name: str) -> None:
        """A call begins."""
        self.seen_call = True
        self._is_open = name in self.tools.schemas and (self.tools.parallel or self._calls == 0)
        if not self._is_open:
            kind = "second" if name in self.tools.schemas else "undeclared"
            logger.warning("dropped a call of the model: %s function %r", kind, shorten(name))
            return
        self._deltas.append(CallStart(self._calls, name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """More of the JSON of the arguments of the call that was started last."""
        if self._is_open:
            self._deltas.append(CallArguments(self._calls - 1, text))

    def take(self) -> list[Delta]:
        """What was found since the last time, neighbours of one kind joined."""
        deltas, self._deltas = self._deltas, []
        return joined(deltas)


def joined(deltas: list[Delta]) -> list[Delta]:
    """``deltas`` with neighbours of one kind as one."""
    result: list[Delta] = []
    run: list[str] = []
    for position, delta in enumerate(deltas):
        if isinstance(delta, CallStart):
            result.append(delta)
            continue
        run.append(delta.text)
        following = deltas[position + 1] if position + 1 < len(deltas) else None
        if type(following) is not type(delta):
            text, run = "".join(run), []
            if isinstance(delta, CallArguments):
                result.append(CallArguments(delta.index, text))
            else:
                result.append(type(delta)(text))
    return result
