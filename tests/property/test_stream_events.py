"""Whatever way a text is cut into snapshots, the events of a stream say what the whole reply says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.frontend.request import FinishReason, GenerationOutput
from sglang_lite.server import chat_routes, completion_routes
from sglang_lite.server.context import ServerContext
from sglang_lite.server.errors import encode_json
from tests.support.fake_engine import FakeEngine

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def snapshots(text: str, cuts: list[int]) -> list[GenerationOutput]:
    stops = sorted({min(cut, len(text)) for cut in cuts})
    made = [GenerationOutput("r", text[:stop], [7] * stop, None, 3, stop, 1) for stop in stops]
    return [*made, GenerationOutput("r", text, [7] * len(text), FinishReason("stop", matched="x"), 3, len(text), 1)]


async def written(kind: str, body: dict[str, Any], text: str, cuts: list[int]) -> list[Any]:
    module: Any = {"chat": chat_routes, "completion": completion_routes}[kind]
    call = module.read_call(ServerContext(FakeEngine()), {**body, "stream": True}, {})
    writer = chat_routes.ChatStreamWriter(call) if kind == "chat" else completion_routes.CompletionWriter(call)
    events: list[Any] = []
    for output in snapshots(text, cuts):
        events += writer.events(0, output)
    # As a client reads them: some are JSON already.
    return [json.loads(event if isinstance(event, bytes) else encode_json(event)) for event in events]


@pytest.mark.parametrize(("kind", "body"), [("chat", {"input_ids": [1]}), ("completion", {"prompt": [1]})])
@given(text=TEXT, cuts=st.lists(st.integers(0, 30), max_size=6))
async def test_assembled_events_equal_encoded_ones(kind: str, body: dict[str, Any], text: str, cuts: list[int]) -> None:
    assembled = await written(kind, body, text, cuts)
    # With usage on every chunk nothing is assembled: the shape is no longer fixed.
    usage = {"stream_options": {"continuous_usage_stats": True}}
    encoded = await written(kind, body | usage, text, cuts)
    assert [without_times(event) for event in assembled] == [without_times(event) for event in encoded]
    shown = [choice_text(kind, event) for event in assembled]
    assert "".join(shown) == text


def choice_text(kind: str, event: Any) -> str:
    choice = event["choices"][0]
    text = choice["text"] if kind == "completion" else choice["delta"].get("content", "")
    assert isinstance(text, str)
    return text


def without_times(event: Any) -> Any:
    return {name: value for name, value in event.items() if name not in ("id", "created", "usage")}
