"""Which format a model writes, by what its chat template mentions: the value ``auto`` of the parser options."""

from __future__ import annotations

_TOOL_SIGNS = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|channel|>", "gpt-oss"),
    ("<minimax:tool_call>", "minimax-m2"),
    ("<steptml:invoke", "step3"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<｜tool▁sep｜>", "deepseekv31"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|action_start|>", "interns1"),
    ("<|python_tag|>", "llama3"),
    ("<|python_start|>", "pythonic"),
    ("<tool_call>", "hermes"),
)
_REASONING_SIGNS = (
    ("<|channel|>", "gpt-oss"),
    ("◁think▷", "kimi"),
    ("[THINK]", "mistral"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("enable_thinking", "qwen3"),
    ("<｜Assistant｜>", "deepseek-r1"),
    ("<think>", "qwen3"),
)


def detect_tool_parser(template: str) -> str | None:
    """The name of the format of calls, None when the template shows none."""
    found = _first(_TOOL_SIGNS, template)
    return "deepseekv3" if found == "deepseekv31" and "```json" in template else found


def detect_reasoning_parser(template: str) -> str | None:
    """The name of the format of reasoning, None when the template shows none."""
    found = _first(_REASONING_SIGNS, template)
    if found == "deepseek-r1" and "thinking" in template:
        return "deepseek-v3"
    return None if found == "deepseek-r1" and "</think>" not in template else found


def _first(signs: tuple[tuple[str, str], ...], template: str) -> str | None:
    return next((name for sign, name in signs if sign in template), None)
