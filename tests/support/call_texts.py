"""Calls as the models write them, for tests of the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]

SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "data": {"type": "object"}},
    },
    "g": {"type": "object", "properties": {}},
}


def tools() -> list[dict[str, Any]]:
    """The functions of ``SCHEMAS`` as a request declares them."""
    return [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in SCHEMAS.items()]


def _call(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _qwen(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_call(*call)}\n</tool_call>" for call in calls)


def _llama3(calls: Calls) -> str:
    return "<|python_tag|>" + "; ".join(_call(*call, "parameters") for call in calls)


def _mistral(calls: Calls) -> str:
    return f"[TOOL_CALLS] [{', '.join(_call(*call) for call in calls)}]" if calls else ""


def _deepseek_v3(calls: Calls) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    each = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def _kimi(calls: Calls) -> str:
    each = (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}"
        "<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _glm(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n" for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def _qwen3_coder(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def _pythonic(calls: Calls) -> str:
    each = (f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls)
    return f"[{', '.join(each)}]"


WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": _qwen,
    "qwen": _qwen,
    "llama3": _llama3,
    "mistral": _mistral,
    "deepseekv3": _deepseek_v3,
    "deepseekv31": _deepseek_v31,
    "kimi_k2": _kimi,
    "glm45": _glm,
    "qwen3_coder": _qwen3_coder,
    "gpt-oss": _harmony,
    "pythonic": _pythonic,
}


def write_calls(name: str, calls: Calls) -> str:
    """``calls`` in the format ``name``."""
    return WRITERS[name](calls)
