"""Reasoning between two markers, and the table of the models that write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_lite.frontend.parsing.events import Collector
from sglang_lite.frontend.parsing.harmony import harmony_reasoning
from sglang_lite.frontend.parsing.source import (
    MAX_TRIMMED,
    Markers,
    Source,
    Steps,
    rest,
    skip_space,
    take,
    text_until,
)


@dataclass(frozen=True, slots=True)
class Toggle:
    """How a request turns reasoning on and off.

    Attributes:
        variable: of the chat template; empty when it cannot be turned off.
        default: what holds when the request does not say.
    """

    variable: str = ""
    default: bool = True

    def is_on(self, variables: Mapping[str, Any]) -> bool:
        """Whether the model shall reason, by the variables that its template gets."""
        if not self.variable:
            return True
        value = variables.get(self.variable)
        if self.variable == "reasoning_effort":
            return value is not None and value != "none"
        return self.default if value is None else value is not False


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One block of reasoning.

    Attributes:
        start, end: the markers; empty for formats that are not made of two markers.
        forced: the answer begins inside the block, whatever the prompt ends with.
        ended_by: further markers that end the block and belong to what follows.
        kind: "block", "harmony", or "prepend": nothing is split off, ``start`` is put before the answer.
    """

    start: str = "<think>"
    end: str = "</think>"
    forced: bool = False
    toggle: Toggle = Toggle()
    ended_by: tuple[str, ...] = ()
    kind: str = "block"

    @property
    def markers(self) -> tuple[str, ...]:
        """What has to be visible in the text for the format to be read."""
        if self.kind == "harmony":
            return ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
        return () if self.kind == "prepend" else (self.start, self.end, *self.ended_by)

    def begins_inside(self, prompt: str | None, continued: str | None = None) -> bool:
        """Whether the output continues a block of reasoning.

        Args:
            prompt: the text that the model continues, None when it is not known.
            continued: the part of it that belongs to the answer already.
        """
        if self.kind != "block":
            return False
        if continued and (self.start in continued or self.end in continued):
            return continued.rfind(self.start) > continued.rfind(self.end)
        return self.forced or (prompt is not None and prompt.rstrip().endswith(self.start))

    def parse(self, source: Source, out: Collector, *, inside: bool) -> Steps[None]:
        """Read the whole text."""
        if self.kind == "harmony":
            yield from harmony_reasoning(source, out)
            return
        if self.kind == "prepend":
            out.text(self.start)
            yield from rest(source, out.text)
            return
        begin = 0
        if inside:
            yield from skip_space(source)
            yield from take(source, self.start)
        else:
            if (yield from text_until(source, Markers(self.start), out.text, trim=MAX_TRIMMED)) is None:
                return
            begin = source.offset - len(self.start)
        yield from skip_space(source)
        ends = Markers(self.end, *self.ended_by)
        end = yield from text_until(source, ends, out.reasoning, trim=MAX_TRIMMED, keep_last_space=False)
        out.spans.append((begin, source.offset))
        if end is None:
            return
        if end != self.end:
            out.text(end)
        else:
            yield from skip_space(source)
        yield from rest(source, out.text)


_FORCED = ReasoningFormat(forced=True)
_ENABLED = ReasoningFormat(toggle=Toggle("enable_thinking"))
_ON_REQUEST = ReasoningFormat(toggle=Toggle("enable_thinking", default=False))
_THINKING = ReasoningFormat(toggle=Toggle("thinking", default=False))
_FORCED_ENABLED = ReasoningFormat(forced=True, toggle=Toggle("enable_thinking"))

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek-r1": _FORCED,
    "step3": _FORCED,
    "step3p5": _FORCED,
    "gigachat35": _FORCED,
    "qwen3": _ENABLED,
    "interns1": _ENABLED,
    "dots": _ENABLED,
    "nanbeige": _ENABLED,
    "qwen3-thinking": _FORCED_ENABLED,
    "minimax": _FORCED_ENABLED,
    "glm45": _ENABLED,
    "nemotron_3": _ENABLED,
    "granite_thinking_parser": _ENABLED,
    "ling3": _ENABLED,
    "deepseek-v3": _THINKING,
    "deepseek-v4": _THINKING,
    "kimi_k2": ReasoningFormat(toggle=Toggle("thinking"), ended_by=("<|tool_calls_section_begin|>",)),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", toggle=Toggle("reasoning_effort", default=False)),
    "mimo": _ON_REQUEST,
    "poolside_v1": _ON_REQUEST,
    "hunyuan": ReasoningFormat(toggle=Toggle("reasoning_effort", default=False)),
    "gpt-oss": ReasoningFormat(kind="harmony"),
    "minimax-append-think": ReasoningFormat(kind="prepend"),
}
"""The formats by the names of ``--reasoning-parser``."""
