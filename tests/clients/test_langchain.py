"""LangChain's ChatOpenAI."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server import ServerProcess

langchain_openai = pytest.importorskip("langchain_openai", reason="needs the optional group `clients`")


def chat(server: ServerProcess, **options: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        model="chain", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_retries=0, **options
    )


def test_invoke(server: ServerProcess) -> None:
    answer = chat(server).invoke([("user", "a")])
    assert answer.content == "é🙂!"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] == 8
    assert answer.usage_metadata["input_tokens"] == len("user:a")


def test_stream_is_what_invoke_gives(server: ServerProcess) -> None:
    model = chat(server, max_tokens=50, stream_usage=True)
    chunks = list(model.stream([("user", "A")]))
    assert len([chunk for chunk in chunks if chunk.content]) > 5
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    answer = model.invoke([("user", "A")])
    assert whole.content == answer.content == ("BCDA" * 13)[:50]
    assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"] == 50


def test_batch_and_stop(server: ServerProcess) -> None:
    answers = chat(server).batch([[("user", "A")], [("user", "0")]], stop=["D", "5"])
    assert [answer.content for answer in answers] == ["BC", "1234"]


def test_an_error_reaches_the_caller(server: ServerProcess) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="max_completion_tokens must be positive"):
        chat(server, max_tokens=-5).invoke([("user", "a")])
