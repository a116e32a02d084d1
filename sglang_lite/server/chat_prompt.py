"""The prompt of a conversation: messages, tools and template variables in the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_lite.frontend.chat_template import parse_template_variables, parse_tools
from sglang_lite.frontend.fields import shorten, wrong_type
from sglang_lite.frontend.validation import parse_token_ids
from sglang_lite.server import fields
from sglang_lite.server.context import ServerContext
from sglang_lite.server.sequences import Prompt
from sglang_lite.types import RequestError

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")


def chat_prompt(context: ServerContext, body: Mapping[str, Any]) -> Prompt:
    """The prompt of a chat completion: ``input_ids`` as they are, else the rendered messages.

    Raises:
        RequestError: a field is wrong, there is no template, or it refuses the messages.
    """
    if body.get("input_ids") is not None:
        return parse_token_ids(body["input_ids"], vocab_size=context.engine.info.vocab_size)
    return render_messages(context, body)


def render_messages(context: ServerContext, body: Mapping[str, Any]) -> str:
    """The text of the messages in ``body``.

    Raises:
        RequestError: a field is wrong, there is no template, or it refuses the messages.
    """
    if context.chat_template is None:
        raise RequestError("messages need a tokenizer; this server runs with --skip-tokenizer-init", field="messages")
    continue_final = fields.boolean(body, "continue_final_message")
    return context.chat_template.render(
        body.get("messages"),
        tools=_shown_tools(body),
        add_generation_prompt=fields.boolean(body, "add_generation_prompt", not continue_final),
        continue_final_message=continue_final,
        variables={**_effort_variables(body), **parse_template_variables(body.get("chat_template_kwargs"))},
    )


def _shown_tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the model gets to see.

    Raises:
        RequestError: wrong shape, or a choice that needs constrained decoding.
    """
    tools, choice = parse_tools(body.get("tools")), body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None if choice == "none" else tools
    if choice != "required" and not isinstance(choice, dict):
        wrong_type("tool_choice", choice, "auto, none, required or an object that names a function")
    if not tools:
        kind = "required" if choice == "required" else "a specific tool"
        raise RequestError(f"Tools cannot be empty if tool choice is set to {kind}.", field="tools")
    raise RequestError(f"tool_choice {shorten(choice)} is not supported yet", field="tool_choice")


def _effort_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    effort = body.get("reasoning_effort")
    if effort is None:
        return {}
    if isinstance(effort, bool) or not isinstance(effort, str | int | float):
        wrong_type("reasoning_effort", effort, "a string or a number")
    if isinstance(effort, str) and effort not in _EFFORTS:
        raise RequestError(
            f"reasoning_effort must be one of {', '.join(_EFFORTS)}, got {shorten(effort)!r}", field="reasoning_effort"
        )
    thinks = effort != "none"
    return {"reasoning_effort": effort, "thinking": thinks, "enable_thinking": thinks}
