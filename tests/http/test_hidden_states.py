"""``return_hidden_states`` of /generate, against the chain model, whose state after a token is that token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.support.server import LocalServer, greedy, local_server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def telling(chain_model: Path) -> AsyncIterator[LocalServer]:
    """A server that returns hidden states."""
    async with local_server(
        chain_model, page_size=1, max_total_tokens=4096, enable_return_hidden_states=True
    ) as started:
        yield started


def tokens_of(states: Any) -> list[int]:
    """The token that each state stands for: the embedding is one at the token's place."""
    return [int(np.argmax(np.abs(state))) for state in states]


@pytest.mark.parametrize("again", [False, True], ids=["cold", "cached"])
async def test_states_of_prompt_and_output(telling: LocalServer, again: bool) -> None:
    result = await telling.generate("0ABA", sampling={"max_new_tokens": 4}, return_hidden_states=True)
    states = result["meta_info"]["hidden_states"]
    assert tokens_of(states[0]) == list(b"0ABA")
    assert tokens_of(states[1:]) == list(b"BCD")
    assert len(states[1]) == 512
    assert not any("logprobs" in name for name in result["meta_info"])


async def test_the_last_state_alone(telling: LocalServer) -> None:
    result = await telling.generate("0A", sampling={"max_new_tokens": 4}, return_hidden_states="last")
    assert tokens_of(result["meta_info"]["hidden_states"]) == list(b"D")


async def test_states_beside_log_probabilities(telling: LocalServer) -> None:
    for start, shown in ((-1, []), (0, [65, 66, 67]), (2, [67])):
        result = await telling.generate(
            "ABC",
            sampling={"max_new_tokens": 2},
            return_hidden_states=True,
            return_logprob=True,
            logprob_start_len=start,
        )
        meta = result["meta_info"]
        assert [entry[1] for entry in meta["input_token_logprobs"]] == shown
        assert [entry[1] for entry in meta["output_token_logprobs"]] == list(b"DA")
        assert tokens_of(meta["hidden_states"][0]) == list(b"ABC")


async def test_states_of_a_batch_and_of_a_stream(telling: LocalServer) -> None:
    results = await telling.generate(["A", "00"], sampling={"max_new_tokens": 2}, return_hidden_states=True)
    assert [tokens_of(result["meta_info"]["hidden_states"][0]) for result in results] == [[65], [48, 48]]
    body = {**greedy("A", {"max_new_tokens": 3}), "return_hidden_states": True, "stream": True}
    events = (await telling.post("/generate", body)).events
    assert tokens_of(events[-2]["meta_info"]["hidden_states"][1:]) == list(b"BC")
    assert all("hidden_states" not in event["meta_info"] for event in events[:-2])


async def test_states_have_to_be_allowed(server: LocalServer, telling: LocalServer) -> None:
    refused = await server.post("/generate", {**greedy("A"), "return_hidden_states": True})
    assert (refused.status, "--enable-return-hidden-states" in refused.text) == (400, True)
    assert (await server.post("/generate", {**greedy("G"), "return_hidden_states": False})).status == 200
    for wrong in ("first", 1, []):
        assert (await telling.post("/generate", {**greedy("A"), "return_hidden_states": wrong})).status == 400
