"""Templates that take long or make much: refused in bounded time, whatever the messages are."""

from __future__ import annotations

import dataclasses
import time

import pytest

from sglang_lite.frontend import chat_template, template_bounds
from sglang_lite.frontend.chat_template import ChatTemplate, parse_tools
from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.types import RequestError

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dataclasses.replace(LIMITS, template_seconds=0.2, prompt_characters=10_000, messages=64, tool_bytes=1000)
    monkeypatch.setattr(template_bounds, "LIMITS", limits)
    monkeypatch.setattr(chat_template, "LIMITS", limits)


def render(source: str) -> str:
    return ChatTemplate({"default": source}).render(MESSAGES)


def test_loops_without_output_end_in_time() -> None:
    nested = "{% for a in range(90000) %}{% for b in range(90000) %}{% set c = b %}{% endfor %}{% endfor %}"
    began = time.monotonic()
    with pytest.raises(RequestError, match=r"more than 0\.2 s") as caught:
        render(nested)
    assert time.monotonic() - began < 5
    assert (caught.value.status, caught.value.field) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{{ messages[0].content }}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ 9 ** 99999999 }}",
    ],
)
def test_huge_results_are_refused(source: str) -> None:
    with pytest.raises(RequestError, match="more than 10000 characters"):
        render(source)


def test_what_templates_know_about_their_loops_stays() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ':last' if loop.last }}"
        "{{ loop.previtem.role if loop.previtem is defined }}={{ m.content }};{% endfor %}"
        "{% for k, v in {'a': 1}.items() if v %}{{ k }}{% else %}none{% endfor %}"
        "{% for x in nothing %}{% else %}empty{% endfor %}"
        "{%- for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}{{ 2 * 3 + 2 ** 3 }}"
    )
    assert render(source) == "1/2=hello;2/2:lastuser=you;aempty12314"


def test_too_many_messages_and_tools() -> None:
    with pytest.raises(RequestError, match="messages has 65 entries, over the limit of 64"):
        ChatTemplate({"default": "x"}).render([MESSAGES[0]] * 65)
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 1000}}
    with pytest.raises(RequestError, match="tools are over the limit of 1000 bytes"):
        parse_tools([tool])
    with pytest.raises(RequestError, match="tools has 1025 entries"):
        parse_tools([{}] * 1025)
