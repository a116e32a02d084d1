"""The formats of tool calls by the names of ``--tool-call-parser``."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sglang_lite.frontend.parsing import call_syntax
from sglang_lite.frontend.parsing.call_syntax import CallSyntax
from sglang_lite.frontend.parsing.events import Collector
from sglang_lite.frontend.parsing.harmony import harmony_calls
from sglang_lite.frontend.parsing.json_calls import TaggedJson, calls_only, llama3, mistral
from sglang_lite.frontend.parsing.pythonic import LFM2, PYTHONIC
from sglang_lite.frontend.parsing.section_calls import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2
from sglang_lite.frontend.parsing.source import Source, Steps
from sglang_lite.frontend.parsing.tagged_calls import GLM45, MINIMAX_M2, QWEN3_CODER, STEP3


def random_id(name: str, index: int) -> str:
    """``call_`` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


def counted_id(name: str, index: int) -> str:
    """Kimi's: the function and the number of the call in the conversation."""
    return f"functions.{name}:{index}"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        parse: reads the whole text.
        call_id: id of a call, by function and by its number in the conversation.
        syntaxes: how a grammar writes it, the first one that the model knows; none where no grammar does.
    """

    parse: Callable[[Source, Collector], Steps[None]]
    call_id: Callable[[str, int], str] = random_id
    syntaxes: tuple[CallSyntax, ...] = ()


_HERMES = ToolFormat(TaggedJson("<tool_call>", "</tool_call>").parse, syntaxes=(call_syntax.HERMES,))
_GLM = ToolFormat(GLM45.parse)
_QWEN3_CODER = ToolFormat(QWEN3_CODER.parse, syntaxes=(call_syntax.QWEN3_CODER,))

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "nanbeige": _QWEN3_CODER,
    "step3p5": _QWEN3_CODER,
    "mimo": ToolFormat(QWEN3_CODER.parse),
    "llama3": ToolFormat(llama3, syntaxes=(call_syntax.LLAMA3,)),
    "mistral": ToolFormat(mistral, syntaxes=(call_syntax.MISTRAL_ARGS, call_syntax.MISTRAL)),
    "deepseekv3": ToolFormat(DEEPSEEK_V3.parse, syntaxes=(call_syntax.DEEPSEEK_V3,)),
    "deepseekv31": ToolFormat(DEEPSEEK_V31.parse, syntaxes=(call_syntax.DEEPSEEK_V31,)),
    "glm": _GLM,
    "glm45": _GLM,
    "glm47": ToolFormat(GLM45.parse, syntaxes=(call_syntax.GLM47,)),
    "kimi_k2": ToolFormat(KIMI_K2.parse, counted_id, syntaxes=(call_syntax.KIMI_K2,)),
    "gpt-oss": ToolFormat(harmony_calls, syntaxes=(call_syntax.HARMONY,)),
    "pythonic": ToolFormat(PYTHONIC.parse),
    "lfm2": ToolFormat(LFM2.parse),
    "minimax-m2": ToolFormat(MINIMAX_M2.parse),
    "step3": ToolFormat(STEP3.parse),
    "interns1": ToolFormat(
        TaggedJson("<|action_start|> <|plugin|>", "<|action_end|>").parse, syntaxes=(call_syntax.INTERNS1,)
    ),
}
"""The formats by name."""

CALLS_ONLY = ToolFormat(calls_only)
"""The text is one JSON array of calls: what the grammar of a required call makes."""
