"""Chats to prompts: equal to transformers where the template allows it, a 400 for everything malformed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sglang_lite.frontend.chat_template import ChatTemplate, parse_template_variables, parse_tools, read_template_option
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.types import RequestError, StartupError
from tests.unit.frontend.vocabularies import chain_backend

PLAIN = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% if not loop.last %}|{% endif %}{% endfor %}"
CHATML = """{%- for message in messages %}
    {%- if message.role == 'system' and loop.index0 > 0 %}
        {{- raise_exception('system must come first') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
BUSY = """{{ bos_token }}
{% set ns = namespace(n=0) %}
{% for message in messages %}
    {% if message['role'] == 'tool' %}{% continue %}{% endif %}
    {% if ns.n > 5 %}{% break %}{% endif %}
    {% set ns.n = ns.n + 1 %}
{{ ns.n }} {{ message.content | trim }}
{% if message.tool_calls %}
{{ message.tool_calls[0].function.arguments | tojson }}
{% endif %}
{% generation %}x{% endgeneration %}
{% endfor %}
{% if tools %}
{{ tools | tojson(indent=2) }}
{% endif %}
{{ strftime_now('%Y') | length }} {{ extra is defined }} {{ {'é<&>': "'"} | tojson }}
"""
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": " be brief "},
    {"role": "user", "content": "héllo <b>"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": ["é", 1]}}}],
    },
    {"role": "tool", "content": "42"},
    {"role": "user", "content": "and?"},
]


def template(source: str = PLAIN, **options: Any) -> ChatTemplate:
    return ChatTemplate({"default": source}, **options)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("source", [PLAIN, CHATML, BUSY])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_equal_to_transformers(source: str, add_generation_prompt: bool, tools: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    expected = render_jinja_template(
        conversations=[CONVERSATION],
        chat_template=source,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
    )[0][0]
    rendered = template(source, variables={"bos_token": "<s>"}).render(
        CONVERSATION, tools=tools, add_generation_prompt=add_generation_prompt
    )
    assert rendered == expected


@pytest.mark.demo_model
def test_demo_model_as_recorded(demo_model: Path, demo_goldens: list[dict[str, Any]]) -> None:
    """Prompts, their ids and the texts of outputs, as transformers made them."""
    tokenizer = Tokenizer.load(demo_model)
    chat = ChatTemplate.for_tokenizer(tokenizer)
    for case in demo_goldens:
        prompt = case["prompt"]
        if case["kind"] == "chat":
            prompt = chat.render(case["messages"])
            assert prompt == case["rendered"]
        assert tokenizer.encode(prompt, add_special_tokens=False) == case["input_ids"]
        detokenizer = tokenizer.detokenizer()
        text = "".join([*(detokenizer.push(token_id) for token_id in case["output_ids"]), detokenizer.finish()])
        assert text == case["output_text"]


def test_content_forms() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template().render(user(parts)) == "user:a b"
    assert template().render(user([])) == "user:"
    assert template().render(user("")) == "user:"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert template().render([*user("x"), call]) == "user:x|assistant:"


def test_roles_are_case_insensitive() -> None:
    assert template().render([{"role": "User", "content": "x"}]) == "user:x"


def test_developer_is_the_system_where_the_template_does_not_know_it() -> None:
    chat = [{"role": "developer", "content": "x"}]
    assert template().render(chat) == "system:x"
    assert template(PLAIN + "{# developer #}").render(chat) == "developer:x"
    assert chat[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "Messages cannot be empty."),
        (None, "messages: invalid type: null"),
        ("hi", 'messages: invalid type: string "hi"'),
        ([5], "messages[0]: invalid type: integer `5`"),
        ([{"content": "x"}], "messages[0].role must be one of system, developer, user"),
        ([{"role": "bot", "content": "x"}], 'got "bot"'),
        (user(5), "messages[0].content must be a string or a list of text parts, got integer `5`."),
        (user(None), "messages[0].content must be a string or a list of text parts for role user, got null."),
        (user({"type": "text"}), "messages[0].content must be a string or a list of text parts, got map."),
        (user([{"type": "text"}]), "messages[0].content[0].text must be a string, got null."),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0] has type image_url"),
        (user([{"type": "video_url"}]), "has type video_url"),
        (user([{"type": "input_audio"}]), "has type input_audio"),
        (user([{"type": 5}]), "has type integer `5`"),
        ([{"role": "assistant", "content": None, "tool_calls": {}}], "messages[0].tool_calls: invalid type: map"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]: invalid type"),
        ([{"role": "assistant", "tool_calls": [{"function": 5}]}], "messages[0].tool_calls[0].function: invalid type"),
    ],
)
def test_malformed_messages(messages: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        template().render(messages)
    assert message in caught.value.message
    assert caught.value.status == 400
    assert caught.value.field is not None
    assert caught.value.field.startswith("messages")


def test_tool_arguments_become_objects() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"

    def rendered(arguments: str) -> str:
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        return template(source).render([call])

    assert rendered('{"a": "é"}') == '{"a": "é"}'
    assert rendered("not json") == '"not json"'
    assert rendered("[1]") == '"[1]"'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no way') }}",
        "{{ messages[5].content }}",
        "{{ messages[0].content + 5 }}",
        "{{ 1 // 0 }}",
        "{{ messages | map('nothing') | list }}",
        "{{ messages[0].content.nothing.deeper }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ range(10**9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_failures_of_a_template_are_bad_requests(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template") as caught:
        template(source).render(user("x"))
    assert caught.value.status == 400


def test_reason_of_the_template_is_passed_on() -> None:
    with pytest.raises(RequestError, match="system must come first"):
        template(CHATML).render([*user("x"), {"role": "system", "content": "y"}])


def test_continue_final_message() -> None:
    chat = [*user("x"), {"role": "assistant", "content": " begun "}]
    assert template(CHATML).render(chat, continue_final_message=True).endswith("<|im_start|>assistant\n begun ")
    stripping = CHATML.replace("message.content", "(message.content | trim)")
    assert template(stripping).render(chat, continue_final_message=True).endswith("<|im_start|>assistant\nbegun")


@pytest.mark.parametrize("text", ["<", "m", "|", "end", "<|im_end|>"])
def test_continued_text_that_the_end_of_a_turn_repeats(text: str) -> None:
    chat = [*user("x"), {"role": "assistant", "content": text}]
    assert template(CHATML).render(chat, continue_final_message=True).endswith(f"<|im_start|>assistant\n{text}")


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (user("x"), "last message of role assistant, got user"),
        ([{"role": "assistant", "content": " "}], "not empty"),
        ([{"role": "assistant", "content": "abc"}], "changes the text"),
    ],
)
def test_refused_continuations(chat: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        template("fixed").render(chat, continue_final_message=True)


def test_variables() -> None:
    source = "{{ thinking }}{{ bos_token }}{{ messages | length }}"
    chat = template(source, variables={"bos_token": "<s>"}, default_variables={"thinking": "auto"})
    assert chat.render(user("x")) == "auto<s>1"
    assert chat.render(user("x"), variables={"thinking": "off", "self": 1}) == "off<s>1"


@pytest.mark.parametrize(
    "raw",
    [5, [], "x", {"messages": []}, {"tools": 1}, {"add_generation_prompt": False}, {"chat_template": "x"}],
)
def test_refused_variables(raw: Any) -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs") as caught:
        parse_template_variables(raw)
    assert caught.value.field == "chat_template_kwargs"


def test_tools_have_their_own_template() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].function.name }}"})
    assert chat.render(user("x")) == "plain"
    assert chat.render(user("x"), tools=TOOLS) == "f"


@pytest.mark.parametrize(
    "raw", [{}, "x", [5], [{}], [{"function": 5}], [{"function": {}}], [{"function": {"name": ""}}]]
)
def test_refused_tools(raw: Any) -> None:
    with pytest.raises(RequestError, match="tools"):
        parse_tools(raw)


def test_tools() -> None:
    assert parse_tools(None) is None
    assert parse_tools([]) is None
    assert parse_tools(TOOLS) == TOOLS


def test_no_template() -> None:
    chat = ChatTemplate({})
    assert not chat.available
    with pytest.raises(RequestError, match="no chat template; start the server with --chat-template"):
        chat.render(user("x"))


def test_override(tmp_path: Path) -> None:
    tokenizer = Tokenizer(chain_backend(), chat_templates={"default": "own"}, named_tokens={"eos_token": "<|eos|>"})
    assert ChatTemplate.for_tokenizer(tokenizer).render(user("x")) == "own"
    inline = ChatTemplate.for_tokenizer(tokenizer, override="{{ eos_token }}!")
    assert inline.render(user("x")) == "<|eos|>!"
    (tmp_path / "t.jinja").write_text("from file")
    assert read_template_option(str(tmp_path / "t.jinja")) == "from file"
    (tmp_path / "t.json").write_text('{"chat_template": "from json"}')
    assert read_template_option(str(tmp_path / "t.json")) == "from json"


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"chat_template": 5}'])
def test_damaged_template_files(tmp_path: Path, content: str) -> None:
    file = tmp_path / "t.json"
    file.write_text(content)
    with pytest.raises(StartupError, match=re.escape(str(file))):
        read_template_option(str(file))


def test_unknown_template_option() -> None:
    with pytest.raises(StartupError, match="chatml is neither a file nor Jinja text"):
        read_template_option("chatml")


def test_invalid_template_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match="chat template 'default' is not valid: line 2"):
        template("a\n{% for %}")


def test_parts_of_reasoning_become_the_reasoning_of_the_message() -> None:
    template = ChatTemplate({"default": "{{ messages[1].reasoning_content }}|{{ messages[1].content }}"})
    parts = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "so"},
        {"type": "reasoning", "reasoning": "ah"},
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}]
    assert template.render(messages) == "hm\nah|so"
    for role, part in (("user", parts[0]), ("assistant", {"type": "thinking", "thinking": 3})):
        with pytest.raises(RequestError, match=r"messages\[1\]\.content\[0\]"):
            template.render([messages[0], {"role": role, "content": [part]}])
