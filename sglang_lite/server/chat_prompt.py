"""The prompt of a conversation: messages, tools and template variables in the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_lite.frontend.chat_template import parse_template_variables
from sglang_lite.frontend.fields import shorten, wrong_type
from sglang_lite.frontend.tool_choice import ToolChoice, read_tool_choice
from sglang_lite.frontend.validation import parse_token_ids
from sglang_lite.server import fields
from sglang_lite.server.context import ServerContext
from sglang_lite.server.sequences import Prompt
from sglang_lite.types import RequestError

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")


def chat_prompt(context: ServerContext, body: Mapping[str, Any], tools: ToolChoice) -> Prompt:
    """The prompt of a chat completion: ``input_ids`` as they are, else the rendered messages.

    Raises:
        RequestError: a field is wrong, there is no template, or it refuses the messages.
    """
    if body.get("input_ids") is not None:
        return parse_token_ids(body["input_ids"], vocab_size=context.engine.info.vocab_size)
    return render_messages(context, body, tools)


def render_messages(context: ServerContext, body: Mapping[str, Any], tools: ToolChoice | None = None) -> str:
    """The text of the messages in ``body``.

    Args:
        tools: what ``body`` says of tools, where that is known already.

    Raises:
        RequestError: a field is wrong, there is no template, or it refuses the messages.
    """
    if context.chat_template is None:
        raise RequestError("messages need a tokenizer; this server runs with --skip-tokenizer-init", field="messages")
    continue_final = fields.boolean(body, "continue_final_message")
    choice = read_tool_choice(body) if tools is None else tools
    return context.chat_template.render(
        body.get("messages"),
        tools=choice.shown,
        add_generation_prompt=fields.boolean(body, "add_generation_prompt", not continue_final),
        continue_final_message=continue_final,
        variables=template_variables(body),
    )


def template_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a request passes to the template: ``chat_template_kwargs`` win over what reasoning fields imply.

    Raises:
        RequestError: a field is wrong.
    """
    return {**_effort_variables(body), **parse_template_variables(body.get("chat_template_kwargs"))}


def _effort_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    effort = body.get("reasoning_effort")
    if effort is None and body.get("reasoning") is not None:
        reasoning = fields.mapping(body, "reasoning")
        effort = reasoning.get("effort")
        if effort is None and reasoning.get("enabled") is not None:
            enabled = fields.boolean(reasoning, "enabled")
            return {"thinking": enabled, "enable_thinking": enabled}
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
