"""How the formats of calls are written, so that a grammar can hold a model to one: as structural tags.

A structural tag leaves text free until a trigger and then forces the rest of a call: the function's name, arguments
that its schema accepts, the closing marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

CALL_WHITESPACE = 1
"""Most characters of whitespace in one place of forced arguments: a model must not fill its answer with it."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}

Style = Literal["json", "qwen_xml", "glm_xml"]


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """``section call (separator call)* section_end``, where a call is ``begin ARGUMENTS end``.

    Attributes:
        begin: with ``%s`` for the name of the function.
        number_end: where it is not empty, ``begin`` is followed by the number of the call and this.
        style: how arguments are written.
        quoted: the name is a JSON string.
        markers: tokens of their own in the models that write this; what a grammar has to know of special tokens.
        needs: a marker without which a model does not write this; empty: every model does.
    """

    begin: str
    end: str
    section: str = ""
    section_end: str = ""
    separator: str = ""
    number_end: str = ""
    style: Style = "json"
    quoted: bool = False
    markers: tuple[str, ...] = ()
    needs: str = ""

    @property
    def trigger(self) -> str:
        """What begins a call, and nothing else does."""
        return self.section or self.begin.partition("%s")[0].partition("\n")[0]

    def writes(self, names: Iterable[str]) -> bool:
        """Whether functions of these names can be called: no name may look like a part of a marker."""
        return self.quoted or all(_PLAIN_NAME.fullmatch(name) for name in names)

    def free(self, schemas: Mapping[str, Mapping[str, Any]], strict: Collection[str], *, single: bool) -> str:
        """A structural tag that leaves the model free to call or not.

        Args:
            schemas: of the parameters, by function.
            strict: functions whose schema is enforced; the arguments of the others are an object.
            single: the answer ends with its first call.
        """
        bounds = {name: schema if name in strict else _ANY_OBJECT for name, schema in schemas.items()}
        tags = self._tags(bounds)
        if self.section:
            tags = [_tag(self.section, self._calls(tags, single=single), self.section_end)]
        return _document(
            {
                "type": "triggered_tags",
                "triggers": [self.trigger],
                "tags": tags,
                "at_least_one": False,
                "stop_after_first": single,
            }
        )

    def forced(self, schemas: Mapping[str, Mapping[str, Any]], *, single: bool) -> str:
        """A structural tag of calls and nothing else.

        Args:
            schemas: of the parameters, by function; all are enforced.
            single: exactly one call.
        """
        calls = self._calls(self._tags(schemas), single=single)
        return _document(_tag(self.section, calls, self.section_end) if self.section else calls)

    def _calls(self, tags: list[dict[str, Any]], *, single: bool) -> dict[str, Any]:
        return {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": single,
        }

    def _tags(self, schemas: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        tags = []
        for name, schema in schemas.items():
            arguments: dict[str, Any] = {
                "type": "json_schema",
                "json_schema": dict(schema or _NO_PARAMETERS),
                "style": self.style,
                "max_whitespace_cnt": CALL_WHITESPACE,
            }
            if self.number_end:
                number = {"type": "regex", "pattern": "[0-9]{1,3}"}
                end = {"type": "const_string", "value": self.number_end}
                arguments = {"type": "sequence", "elements": [number, end, arguments]}
            shown = json.dumps(name, ensure_ascii=False) if self.quoted else name
            tags.append(_tag(self.begin % shown, arguments, self.end))
        return tags


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _document(form: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)


HERMES = CallSyntax(
    begin='<tool_call>\n{"name": %s, "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
    quoted=True,
    markers=("<tool_call>", "</tool_call>"),
)
LLAMA3 = CallSyntax(
    begin='<|python_tag|>{"name": %s, "parameters": ', end="}", quoted=True, markers=("<|python_tag|>",)
)
MISTRAL = CallSyntax(
    section="[TOOL_CALLS] [",
    begin='{"name": %s, "arguments": ',
    end="}",
    separator=", ",
    section_end="]",
    quoted=True,
    markers=("[TOOL_CALLS]",),
)
MISTRAL_ARGS = CallSyntax(begin="[TOOL_CALLS]%s[ARGS]", end="", markers=("[TOOL_CALLS]", "[ARGS]"), needs="[ARGS]")
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
DEEPSEEK_V3 = CallSyntax(
    section=_DEEPSEEK[0],
    begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    separator="\n",
    section_end=_DEEPSEEK[4],
    markers=_DEEPSEEK,
)
DEEPSEEK_V31 = CallSyntax(
    section=_DEEPSEEK[0],
    begin="<｜tool▁call▁begin｜>%s<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    section_end=_DEEPSEEK[4],
    markers=_DEEPSEEK,
)
KIMI_K2 = CallSyntax(
    section="<|tool_calls_section_begin|>",
    begin="<|tool_call_begin|>functions.%s:",
    number_end="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    section_end="<|tool_calls_section_end|>",
    markers=(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
)
QWEN3_CODER = CallSyntax(
    begin="<tool_call>\n<function=%s>\n",
    end="\n</function>\n</tool_call>",
    separator="\n",
    style="qwen_xml",
    markers=HERMES.markers,
)
GLM47 = CallSyntax(
    begin="<tool_call>%s",
    end="</tool_call>",
    style="glm_xml",
    markers=(*HERMES.markers, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
INTERNS1 = CallSyntax(
    begin='<|action_start|> <|plugin|>\n{"name": %s, "parameters": ',
    end="}<|action_end|>",
    separator="\n",
    quoted=True,
    markers=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
)
# The call ends with a token that ends the text, which every grammar allows behind its end.
HARMONY = CallSyntax(
    begin="<|channel|>commentary to=functions.%s <|constrain|>json<|message|>",
    end="",
    separator="<|start|>assistant",
    markers=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
)

_ALL = (
    *(HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, DEEPSEEK_V3, DEEPSEEK_V31),
    *(KIMI_K2, QWEN3_CODER, GLM47, INTERNS1, HARMONY),
)
CALL_MARKERS = tuple(dict.fromkeys(marker for syntax in _ALL for marker in syntax.markers))
"""The markers of all formats."""
