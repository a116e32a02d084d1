"""``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_lite.frontend.chat_template import parse_tools
from sglang_lite.frontend.fields import describe, read_bool, shorten, wrong_type
from sglang_lite.frontend.parsing.events import Toolset
from sglang_lite.types import RequestError

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_DEFINITIONS = ("$defs", "definitions")
_CONSTRAINTS = ("regex", "ebnf", "json_schema", "structural_tag")


@dataclass(slots=True, frozen=True)
class ToolChoice:
    """What the model may call.

    Attributes:
        shown: the tools that the model gets to see, None for none.
        toolset: the functions that it may call.
        forced: it has to call one.
        strict: functions whose schema is enforced where the model is free to call.
    """

    shown: list[dict[str, Any]] | None = None
    toolset: Toolset = field(default_factory=Toolset)
    forced: bool = False
    strict: frozenset[str] = frozenset()

    def schema(self, *, single: bool) -> str:
        """The JSON schema of the array of calls that a forced choice has to write.

        Args:
            single: exactly one call.

        Raises:
            RequestError: two functions define different things under one name.
        """
        shared: dict[str, dict[str, Any]] = {}
        branches = []
        for name, parameters in self.toolset.schemas.items():
            own = dict(parameters or _NO_PARAMETERS)
            for word in _DEFINITIONS:
                for key, value in (own.pop(word, None) or {}).items():
                    if shared.setdefault(word, {}).setdefault(key, value) != value:
                        raise RequestError(
                            f"tools: two functions have different definitions of {shorten(key)!r}; with tool_choice "
                            "required they have to agree: rename one",
                            field="tools",
                        )
            properties = {"name": {"type": "string", "enum": [name]}, "parameters": own}
            shape = {"type": "object", "properties": properties, "required": ["name", "parameters"]}
            branches.append({**shape, "additionalProperties": False})
        items = branches[0] if len(branches) == 1 else {"anyOf": branches}
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items, **shared}
        if single or not self.toolset.parallel:
            schema["maxItems"] = 1
        return json.dumps(schema)


def read_tool_choice(body: Mapping[str, Any]) -> ToolChoice:
    """Check the three fields.

    Raises:
        RequestError: a wrong shape, a function that is not there, or a forced choice beside another constraint.
    """
    tools, choice = parse_tools(body.get("tools")), body.get("tool_choice")
    parallel = body.get("parallel_tool_calls")
    is_parallel = True if parallel is None else read_bool("parallel_tool_calls", parallel)
    schemas = {tool["function"]["name"]: _parameters(index, tool) for index, tool in enumerate(tools or ())}
    if choice in (None, "auto", "none"):
        if choice == "none" or not tools:
            return ToolChoice()
        strict = frozenset(tool["function"]["name"] for index, tool in enumerate(tools) if _is_strict(index, tool))
        return ToolChoice(tools, Toolset(schemas, parallel=is_parallel), strict=strict)
    if choice != "required" and not isinstance(choice, dict):
        wrong_type("tool_choice", choice, "auto, none, required or an object that names a function")
    if not tools:
        kind = "required" if choice == "required" else "a specific tool"
        raise RequestError(f"Tools cannot be empty if tool choice is set to {kind}.", field="tools")
    _refuse_other_constraints(body)
    if choice == "required":
        return ToolChoice(tools, Toolset(schemas, parallel=is_parallel), forced=True)
    name = _chosen_name(choice)
    if name not in schemas:
        raise RequestError(f"Tool '{shorten(name)}' not found in tools list.", field="tool_choice")
    shown = [tool for tool in tools if tool["function"]["name"] == name]
    return ToolChoice(shown, Toolset({name: schemas[name]}, parallel=False), forced=True)


def _parameters(index: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    kind, parameters = tool.get("type", "function"), tool["function"].get("parameters")
    if kind != "function":
        raise RequestError(f"tools[{index}].type must be function, got {shorten(kind)!r}", field="tools")
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise RequestError(
            f"Tool {index} function has invalid 'parameters' schema: expected an object, got {describe(parameters)}",
            field="tools",
        )
    for word in (*_DEFINITIONS, "properties"):
        if not isinstance(parameters.get(word, {}), Mapping):
            raise RequestError(
                f"Tool {index} function has invalid 'parameters' schema: {word} must be an object", field="tools"
            )
    return parameters


def _is_strict(index: int, tool: Mapping[str, Any]) -> bool:
    strict = tool["function"].get("strict")
    return False if strict is None else read_bool(f"tools[{index}].function.strict", strict)


def _chosen_name(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise RequestError(
            'tool_choice must be auto, none, required or {"type": "function", "function": {"name": ...}}, got '
            f"{shorten(choice)}",
            field="tool_choice",
        )
    return name


def _refuse_other_constraints(body: Mapping[str, Any]) -> None:
    wanted = body.get("response_format")
    is_formatted = wanted is not None and not (isinstance(wanted, Mapping) and wanted.get("type") == "text")
    if is_formatted or any(body.get(name) for name in _CONSTRAINTS):
        raise RequestError(
            "tool_choice 'required' or a named tool cannot be combined with response_format, regex, or ebnf: the "
            "calls are made by a constraint of their own",
            field="tool_choice",
        )
