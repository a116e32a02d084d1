"""``/parse_function_call`` and ``/separate_reasoning``: the parsers on a text that the client has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from sglang_lite.frontend.fields import read_str, shorten
from sglang_lite.frontend.parsing.answer import AnswerFormat, parse_answer
from sglang_lite.frontend.parsing.formats import TOOL_FORMATS
from sglang_lite.frontend.parsing.reasoning import REASONING_FORMATS
from sglang_lite.frontend.tool_choice import read_tool_choice
from sglang_lite.server import fields
from sglang_lite.server.bodies import read_object
from sglang_lite.server.chat_answer import reasoning_parser_name, tool_parser_name
from sglang_lite.server.context import context_of
from sglang_lite.server.errors import json_response
from sglang_lite.types import RequestError


def _chosen(body: Mapping[str, Any], field: str, default: str | None, known: Mapping[str, Any]) -> str:
    name = fields.text(body, field) or default
    if name not in known:
        raise RequestError(
            f"{field} must be one of {', '.join(sorted(known))}, got {shorten(str(name))!r}", field=field
        )
    return str(name)


async def parse_function_call(request: web.Request) -> web.Response:
    """The calls in a text."""
    context, body = context_of(request), await read_object(request)
    text = read_str("text", body.get("text"))
    name = _chosen(body, "tool_call_parser", tool_parser_name(context), TOOL_FORMATS)
    tools = read_tool_choice({"tools": body.get("tools")})
    answer = parse_answer(text, AnswerFormat(calls=TOOL_FORMATS[name], tools=tools.toolset))
    calls = [
        {"tool_index": index, "name": call.name, "parameters": call.arguments}
        for index, call in enumerate(answer.calls)
    ]
    return json_response({"normal_text": answer.content, "calls": calls})


async def separate_reasoning(request: web.Request) -> web.Response:
    """The reasoning in a text, and the rest of it."""
    context, body = context_of(request), await read_object(request)
    text = read_str("text", body.get("text"))
    form = REASONING_FORMATS[_chosen(body, "reasoning_parser", reasoning_parser_name(context), REASONING_FORMATS)]
    answer = parse_answer(text, AnswerFormat(reasoning=form, begins_inside=form.begins_inside(None)))
    result: dict[str, Any] = {"reasoning_text": answer.reasoning, "text": answer.content}
    if fields.boolean(body, "return_blocks"):
        blocks = [("reasoning", answer.reasoning), ("text", answer.content)]
        result["reasoning_blocks"] = [answer.reasoning] if answer.reasoning else []
        result["text_blocks"] = [answer.content] if answer.content else []
        result["blocks"] = [{"type": kind, "text": one} for kind, one in blocks if one]
    return json_response(result)


def add_parsing_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    app.router.add_post("/parse_function_call", parse_function_call)
    app.router.add_post("/separate_reasoning", separate_reasoning)
