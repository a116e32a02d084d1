"""A prefill and a decode server as real processes give what one server gives, over every transfer engine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.disaggregated_pair import DECODE, PREFILL, SHORT_WAITS, Oracle, Pair, is_idle, prompt_of


@pytest.fixture(scope="module", params=["tcp", "mooncake_tcp", "nixl"])
def pair(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(
        request.param, model, tmp_path_factory.mktemp("pair"), environment=SHORT_WAITS, options=["--enable-metrics"]
    )
    try:
        pair.start()
        yield pair
    finally:
        pair.close()


async def test_outputs_and_scores_are_those_of_one_server(pair: Pair, oracle: Oracle) -> None:
    """C809: prompts of less than a page, of whole pages and of several chunks, more than run at once."""
    prompts = [prompt_of(seed, length) for seed, length in enumerate((1, 5, 16, 17, 32, 150, 63, 64, 200, 7))]
    calls = [pair.both(pair.body(prompt, return_logprob=True)) for prompt in prompts]
    for prompt, call in zip(prompts, calls, strict=True):
        prefilled, decoded = await call[PREFILL], await call[DECODE]
        assert (prefilled.status, decoded.status) == (200, 200), (prefilled, decoded)
        expected = oracle.tokens(prompt)
        assert decoded.tokens == expected
        assert prefilled.tokens == expected[:1]
        scores = [entry[0] for entry in decoded.body["meta_info"]["output_token_logprobs"]]
        reference = oracle.engine.generate(
            input_ids=prompt,
            sampling_params={"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
            return_logprob=True,
        )
        assert scores == pytest.approx(
            [entry[0] for entry in reference["meta_info"]["output_token_logprobs"]], abs=1e-4
        )
    await pair.settled()


async def test_one_span_a_page(pair: Pair) -> None:
    before = (await pair.loads(PREFILL))["disaggregation"]
    call = pair.both(pair.body(prompt_of(31, 70), count=1))
    assert (await call[DECODE]).status == 200
    await pair.settled()
    after = (await pair.loads(PREFILL))["disaggregation"]
    assert after["spans"] - before["spans"] == 5  # of 16 tokens
    page_bytes = 16 * 1024  # 2 layers of keys and values of 2 heads of 32 in float32
    assert after["bytes"] - before["bytes"] == 5 * page_bytes


async def test_streams_batches_and_choices(pair: Pair, oracle: Oracle) -> None:
    prompt = prompt_of(40, 33)
    body = pair.body(prompt, stream=True)
    prefilled = asyncio.create_task(pair.send(PREFILL, body))
    streamed = (await pair.send(DECODE, body)).body
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert events[-1]["output_ids"] == oracle.tokens(prompt)
    assert len(events) > 1
    assert streamed.rstrip().endswith("data: [DONE]")
    assert (await prefilled).status == 200
    batch = [prompt_of(41, 20), prompt_of(42, 35)]
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True, "n": 2}
    calls = pair.both(pair.body(batch, 5000, sampling_params=sampling))  # type: ignore[arg-type]
    answers = (await calls[DECODE]).body
    assert [answer["output_ids"] for answer in answers] == [oracle.tokens(prompt) for prompt in batch for _ in range(2)]
    assert len((await calls[PREFILL]).body) == 4
    await pair.settled()


async def test_a_room_in_use_is_refused_and_the_first_goes_on(pair: Pair, oracle: Oracle) -> None:
    """C813, on both sides; the room is free again afterwards."""
    pair.hold("half")
    first, second = prompt_of(50, 40), prompt_of(51, 40)
    calls = pair.both(pair.body(first, 77))
    await pair.until(DECODE, lambda load: load["disaggregation"]["decode_transfer_queue_reqs"] == 1)
    for role in (PREFILL, DECODE):
        answer = await pair.send(role, pair.body(second, 77))
        assert answer.status == 400, answer
        assert "room 77" in answer.body["error"]["message"]
    pair.open()
    assert (await calls[DECODE]).tokens == oracle.tokens(first)
    again = pair.both(pair.body(second, 77))
    assert (await again[DECODE]).tokens == oracle.tokens(second)
    await pair.settled()


@pytest.mark.parametrize("role", [PREFILL, DECODE])
@pytest.mark.parametrize("gate", ["half", "done"])
async def test_an_abort_reaches_the_other_side_within_a_second(pair: Pair, role: str, gate: str) -> None:
    """C812: an abort on either side while the pages move."""
    pair.hold(gate)
    body = pair.body(prompt_of(60, 40), rid="to-abort")
    calls = pair.both(body)
    await pair.until(PREFILL, lambda load: load["disaggregation"]["prefill_inflight_queue_reqs"] == 1)
    other = DECODE if role == PREFILL else PREFILL
    await pair.send(role, {"rid": "to-abort"}, "/abort_request")
    answer = await asyncio.wait_for(calls[other], 1.5)
    assert answer.is_failure, answer
    assert (await calls[role]).is_failure
    pair.open()
    await pair.settled()


async def test_a_client_that_leaves_frees_both_sides(pair: Pair) -> None:
    pair.hold("half")
    calls = pair.both(pair.body(prompt_of(61, 40)))
    await pair.until(PREFILL, lambda load: load["disaggregation"]["prefill_inflight_queue_reqs"] == 1)
    calls[DECODE].cancel()
    assert (await asyncio.wait_for(calls[PREFILL], 2.0)).is_failure
    pair.open()
    await pair.settled()


@pytest.mark.parametrize("role", [PREFILL, DECODE])
async def test_a_partner_that_never_comes(pair: Pair, role: str) -> None:
    """C988: an explicit failure after the time that the variable gives, and the pages come back."""
    answer = await pair.send(role, pair.body(prompt_of(62, 40)))
    assert answer.status in (500, 503), answer
    assert 3.5 < answer.seconds < 9.5
    message = json.dumps(answer.body)
    assert "room" in message or "Decode" in message, message
    await pair.settled()


async def test_wrong_bytes_are_found(pair: Pair, oracle: Oracle) -> None:
    pair.hold("wrong")
    calls = pair.both(pair.body(prompt_of(63, 64)))
    answer = await calls[DECODE]
    pair.open()
    assert answer.status == 500
    assert "checksum" in json.dumps(answer.body)
    assert (await asyncio.wait_for(calls[PREFILL], 2.0)).is_failure
    await pair.settled()
    calls = pair.both(pair.body(prompt_of(63, 64)))
    assert (await calls[DECODE]).tokens == oracle.tokens(prompt_of(63, 64))


async def test_transfers_are_told(pair: Pair) -> None:
    await pair.settled()
    calls = pair.both(pair.body(prompt_of(64, 20)))
    assert (await calls[DECODE]).status == 200
    await pair.settled()
    async with aiohttp.ClientSession() as session:
        async with session.get(pair.sides[PREFILL].url + "/poll_transfers") as reply:
            told: dict[str, Any] = await reply.json()
        assert set(told) == {
            "completed_batches", "pending_batches", "completed_descriptor_checksums", "pending_descriptor_checksums",
        }  # fmt: skip
        assert told["completed_batches"] > 0
        assert told["pending_batches"] == 0
        assert all(re.fullmatch("[0-9a-f]{64}", text) for text in told["completed_descriptor_checksums"])
        async with session.get(pair.sides[PREFILL].url + "/server_info") as reply:
            info = await reply.json()
    assert info["disaggregation_mode"] == PREFILL
    assert info["disaggregation_bootstrap_port"] == pair.bootstrap_port


async def test_terminating_a_prefill_server_with_transfers_under_way(pair: Pair) -> None:
    """C816: it frees its batches, unregisters and is gone in time, and its partner's client hears of it."""
    pair.hold("half")
    calls = pair.both(pair.body(prompt_of(65, 40)))
    await pair.until(PREFILL, lambda load: load["disaggregation"]["prefill_inflight_queue_reqs"] == 1)
    seconds = await asyncio.to_thread(pair.sides[PREFILL].terminate)
    assert seconds < 15.0, "5 s, and what a busy machine adds; requests that move get 30 s"
    assert (await asyncio.wait_for(calls[DECODE], 15.0)).is_failure
    assert (await calls[PREFILL]).is_failure
    pair.open()
    await pair.until(DECODE, is_idle)
    await pair.revive()
    calls = pair.both(pair.body(prompt_of(66, 40)))
    assert (await calls[DECODE]).status == 200


async def test_the_first_token_may_be_the_last(pair: Pair, oracle: Oracle) -> None:
    """One token only, a stop token at once, and none that may stop before two."""
    prompt = prompt_of(90, 37)
    first = oracle.tokens(prompt)[0]
    for sampling, expected, reason in (
        ({"max_new_tokens": 1}, [first], {"type": "length", "length": 1}),
        ({"max_new_tokens": 8, "stop_token_ids": [first]}, [first], {"type": "stop", "matched": first}),
    ):
        body = pair.body(prompt, sampling_params={"temperature": 0, **sampling})
        calls = pair.both(body)
        answer = await calls[DECODE]
        assert answer.body["meta_info"]["finish_reason"] == reason, answer
        assert answer.tokens == expected
        assert (await calls[PREFILL]).body["meta_info"]["finish_reason"] == reason
    await pair.settled()


async def test_seeded_samples_are_those_of_one_server(pair: Pair, oracle: Oracle) -> None:
    prompt = prompt_of(91, 50)
    sampling = {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 7, "ignore_eos": True, "top_p": 0.9}
    sampling |= {"frequency_penalty": 0.5, "presence_penalty": 0.2, "min_new_tokens": 3}
    expected = oracle.engine.generate(input_ids=prompt, sampling_params=sampling)["output_ids"]
    assert (await pair.both(pair.body(prompt, sampling_params=sampling))[DECODE]).tokens == list(expected)


async def test_bad_pairs_are_refused_by_name(pair: Pair) -> None:
    for field, value in (
        ("bootstrap_room", -1),
        ("bootstrap_room", 2**63),
        ("bootstrap_room", "5"),
        ("bootstrap_room", [1, 2]),
        ("bootstrap_room", None),
        ("bootstrap_port", 70_000),
        ("bootstrap_host", "2.2.2.2"),
        ("bootstrap_host", "a b"),
        ("bootstrap_host", 5),
        ("disaggregated_params", {"bootstrap_room": 5}),
        ("disagg_prefill_dp_rank", -1),
    ):
        answer = await pair.send(DECODE, pair.body(prompt_of(92, 5), **{field: value}))
        assert answer.status == 400, (field, value, answer)
        assert field in json.dumps(answer.body) or "room" in json.dumps(answer.body), answer
    highest = pair.both(pair.body(prompt_of(92, 5), 2**63 - 1))  # C311
    assert (await highest[DECODE]).status == 200
    nested = pair.body(prompt_of(93, 5))
    pair_fields = {name: nested.pop(name) for name in list(nested) if name.startswith("bootstrap")}
    calls = pair.both({**nested, "disaggregated_params": pair_fields})
    assert (await calls[DECODE]).status == 200
    await pair.settled()


async def test_weights_are_not_replaced_while_pages_are_lent(pair: Pair, model: Path) -> None:
    pair.hold("half")
    calls = pair.both(pair.body(prompt_of(94, 40)))
    await pair.until(PREFILL, lambda load: load["disaggregation"]["prefill_inflight_queue_reqs"] == 1)
    answer = await pair.send(PREFILL, {"model_path": str(model)}, "/update_weights_from_disk")
    assert answer.body.get("success") is False, answer
    assert "busy" in answer.body["message"]
    pair.open()
    assert (await calls[DECODE]).status == 200
    await pair.settled()


async def test_histograms_of_transfers(pair: Pair) -> None:
    """SGLang's names on both sides; every completed transfer is in them."""
    assert (await pair.both(pair.body(prompt_of(95, 20)))[DECODE]).status == 200
    await pair.settled()
    async with aiohttp.ClientSession() as session:
        for role, own in ((PREFILL, "bootstrap_ms"), (DECODE, "alloc_ms")):
            moved = (await pair.loads(role))["disaggregation"]["transfers"]
            async with session.get(pair.sides[role].url + "/metrics") as reply:
                text = await reply.text()
            for name in ("latency_ms", "speed_gb_s", "total_mb"):
                count = re.search(rf"^sglang:kv_transfer_{name}_count{{.*}} ([\d.]+)$", text, re.MULTILINE)
                assert count is not None, name
                assert float(count[1]) == moved
            assert f"sglang:kv_transfer_{own}_bucket" in text
