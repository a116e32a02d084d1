"""LiteLLM, in the way its proxy calls an OpenAI-compatible server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server import ServerProcess


@pytest.fixture(scope="module")
def litellm() -> Any:
    # Read at import, where it would fetch a price list.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        module = pytest.importorskip("litellm", reason="needs the optional group `clients`")
    module.telemetry = False
    module.num_retries = 0
    return module


def options(server: ServerProcess, content: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "openai/chain",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        **more,
    }


def test_completion(server: ServerProcess, litellm: Any) -> None:
    answer = litellm.completion(**options(server, "a"))
    assert answer.choices[0].message.content == "é🙂!"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 8)


def test_stream(server: ServerProcess, litellm: Any) -> None:
    chunks = list(litellm.completion(**options(server, "A", max_tokens=20, stream=True)))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "BCDA" * 5
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


async def test_asynchronous(server: ServerProcess, litellm: Any) -> None:
    answer = await litellm.acompletion(**options(server, "0", stop=["7"]))
    assert answer.choices[0].message.content == "123456"


def test_text_completion(server: ServerProcess, litellm: Any) -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/chain",
        api_base=f"{server.url}/v1",
        api_key="none",
        prompt="0",
        max_tokens=4,
        temperature=0,
    )
    assert answer.choices[0].text == "1234"


def test_an_error_keeps_its_kind(server: ServerProcess, litellm: Any) -> None:
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(**options(server, "a", top_p=7))
