"""Prompts from chats: the model's Jinja template in a sandbox, with the names Hugging Face templates rely on.

Source of the names and of the trimming rules: the chat template guide of the ``transformers`` documentation.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from sglang_lite.frontend.fields import read_object, wrong_type
from sglang_lite.frontend.messages import normalize_messages
from sglang_lite.frontend.request_limits import LIMITS, check_entries
from sglang_lite.frontend.template_bounds import BoundedEnvironment, render_bounded
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.types import RequestError, StartupError

# Shows where the last message ends in a prompt: its own text may occur again in what the template puts behind it. The
# space tells whether the template trims.
_END_MARK = "END-OF-THE-FINAL-MESSAGE "

RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "chat_template")


class ChatTemplate:
    """The chat templates of one model.

    Args:
        templates: name -> source. "default" is for ordinary chats, "tool_use" (if there) for those with tools.
        variables: special tokens by name, such as ``bos_token``.
        default_variables: further template variables that a request may overrule.
    Attributes:
        source: all templates, for those who look for what they mention.

    Raises:
        StartupError: a template is not valid Jinja.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        *,
        variables: Mapping[str, str] | None = None,
        default_variables: Mapping[str, Any] | None = None,
    ) -> None:
        environment = _environment()
        self._templates = {name: _compile(environment, name, source) for name, source in templates.items()}
        self.source = "\n".join(templates.values())
        self._knows_developer = {name: "developer" in source for name, source in templates.items()}
        self._variables = dict(variables or {})
        self._default_variables = dict(default_variables or {})

    @classmethod
    def for_tokenizer(
        cls,
        tokenizer: Tokenizer,
        *,
        override: str | None = None,
        default_variables: Mapping[str, Any] | None = None,
    ) -> ChatTemplate:
        """Templates of a model directory, or the one that ``--chat-template`` names (a file, or Jinja text)."""
        templates = tokenizer.chat_templates if override is None else {"default": read_template_option(override)}
        return cls(templates, variables=tokenizer.named_tokens, default_variables=default_variables)

    @property
    def available(self) -> bool:
        """Whether there is any template to render with."""
        return bool(self._templates)

    def render(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: object = None,
    ) -> str:
        """The prompt text of a chat. It holds its special tokens already: encode it without adding any.

        Args:
            messages: the request's ``messages``, unchecked.
            tools: checked tool definitions.
            continue_final_message: end the prompt inside the last message, which must be the assistant's.
            variables: the request's ``chat_template_kwargs``, unchecked.
        Raises:
            RequestError: 400 for messages that are malformed, too many, or that the template refuses or takes too
                long for, or without a template.
        """
        if isinstance(messages, list):
            check_entries("messages", messages, LIMITS.messages)
        checked = normalize_messages(messages)
        extra = parse_template_variables(variables)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise RequestError(
                "this model has no chat template; start the server with --chat-template FILE, or send the prompt to "
                "/v1/completions",
                field="messages",
            )
        if not self._knows_developer[name]:
            for message in checked:
                if message["role"] == "developer":
                    message["role"] = "system"
        if continue_final_message:
            checked[-1] = {**checked[-1], "content": _final_text(checked) + _END_MARK}
        context: dict[str, Any] = {**self._variables, **self._default_variables, **extra}
        context.update(
            messages=checked,
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
        )
        prompt = _render(template, context)
        return _cut_at_mark(prompt) if continue_final_message else prompt


def parse_template_variables(raw: object) -> dict[str, Any]:
    """Check ``chat_template_kwargs``: an object that does not replace what the server itself passes."""
    if raw is None:
        return {}
    variables = dict(read_object("chat_template_kwargs", raw))
    for name in RESERVED_VARIABLES:
        if name in variables:
            raise RequestError(f"chat_template_kwargs must not contain {name}", field="chat_template_kwargs")
    return variables


def parse_tools(raw: object) -> list[dict[str, Any]] | None:
    """Check ``tools``: a list of objects with a named function. Null and the empty list are no tools."""
    if raw is None:
        return None
    if not isinstance(raw, list):
        wrong_type("tools", raw, "a sequence of tools")
    check_entries("tools", raw, LIMITS.tools)
    if len(json.dumps(raw)) > LIMITS.tool_bytes:
        raise RequestError(f"tools are over the limit of {LIMITS.tool_bytes} bytes", field="tools")
    tools = []
    for index, item in enumerate(raw):
        tool = dict(read_object(f"tools[{index}]", item))
        function = read_object(f"tools[{index}].function", tool.get("function"))
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(f"tools[{index}].function.name must be a non-empty string", field="tools")
        tools.append(tool)
    return tools or None


def read_template_option(option: str) -> str:
    """Source for ``--chat-template``: the text itself when it is Jinja, else the file of that name."""
    if "{{" in option or "{%" in option:
        return option
    file = Path(option)
    if not file.is_file():
        raise StartupError(f"--chat-template: {option} is neither a file nor Jinja text (which contains {{{{ or {{%)")
    text = _read_text(file)
    if file.suffix != ".json":
        return text
    try:
        source = json.loads(text).get("chat_template")
    except (json.JSONDecodeError, AttributeError) as error:
        raise StartupError(f"--chat-template: {file} is not a JSON object: {error}") from error
    if not isinstance(source, str):
        raise StartupError(f'--chat-template: {file} has no string under "chat_template"')
    return source


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--chat-template: cannot read {file}: {error}") from error


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; here its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models have not been trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _compile(environment: BoundedEnvironment, name: str, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise StartupError(f"chat template {name!r} is not valid: line {error.lineno}: {error.message}") from error


def _render(template: jinja2.Template, context: dict[str, Any]) -> str:
    try:
        return render_bounded(template, context)
    except jinja2.TemplateError as error:
        raise RequestError(f"the chat template refused the messages: {error}", field="messages") from error
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        # Templates are small programs: on messages they do not expect they fail in any of these ways.
        raise RequestError(
            f"the chat template failed on these messages: {type(error).__name__}: {error}", field="messages"
        ) from error


def _final_text(messages: list[dict[str, Any]]) -> str:
    last = messages[-1]
    if last["role"] != "assistant":
        raise RequestError(
            f"continue_final_message needs a last message of role assistant, got {last['role']}", field="messages"
        )
    text: str = last["content"]
    if not text.strip():
        raise RequestError("continue_final_message needs a last message that is not empty", field="messages")
    return text


def _cut_at_mark(prompt: str) -> str:
    """The prompt up to the end of the last message's text, without its last white space where the template trims."""
    start = prompt.rfind(_END_MARK.strip())
    if start < 0:
        raise RequestError(
            "continue_final_message: the chat template changes the text of the last message", field="messages"
        )
    text = prompt[:start]
    return text if prompt.startswith(_END_MARK, start) else text.rstrip()
