"""Data parallel replicas behind one front: routing, control calls, loads, and the death of one of them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_lite.engine.async_engine import AsyncEngine
from sglang_lite.engine.batching import Submission, build_columns
from sglang_lite.engine.info import LoadSnapshot
from sglang_lite.engine.limits import PreparedPrompt
from sglang_lite.engine.replicas import ReplicaClient, merge_loads
from sglang_lite.engine.routing import ReplicaLoads, chooser, select_requests
from sglang_lite.frontend.request import GenerateRequest, PromptVectors
from sglang_lite.types import RequestError, SamplingParams, StartupError
from tests.unit.engine.conftest import ask, run_to_end, start_engine, until


def core_ids(engine: AsyncEngine) -> list[int]:
    client = engine._client
    assert isinstance(client, ReplicaClient)
    return [process_id for process_id in client.process_ids if process_id is not None]


async def running(engine: AsyncEngine) -> list[int]:
    return [load.num_running + load.num_waiting for _, load in await engine.replica_loads()]


def test_the_methods_choose_as_they_are_called() -> None:
    loads = ReplicaLoads(3)
    in_turn = chooser("round_robin", loads)
    assert [in_turn() for _ in range(4)] == [0, 1, 2, 0]
    fewest, lightest = chooser("total_requests", loads), chooser("total_tokens", loads)
    loads.sent(0, 10)
    loads.sent(1, 500)
    loads.sent(2, 20)
    loads.sent(2, 20)
    assert (fewest(), lightest()) == (0, 0)
    loads.sent(0, 60)
    loads.sent(0, 60)
    assert (fewest(), lightest()) == (1, 2)
    loads.report(1, LoadSnapshot(page_size=4, num_pages=10, free_pages=6, evictable_pages=2, waiting_tokens=3))
    assert (loads.tokens(1), lightest()) == (11, 1)
    loads.alive.remove(1)
    assert (fewest(), lightest()) == (2, 2)


def test_requests_of_one_session_go_to_one_replica_that_lives() -> None:
    client = ReplicaClient.__new__(ReplicaClient)
    client._loads = loads = ReplicaLoads(4)
    names = [f"session-{number}" for number in range(64)]
    wanted = {name: client.wanted_replica(GenerateRequest(request_id="r", affinity=name)) for name in names}
    assert set(wanted.values()) == {0, 1, 2, 3}
    assert all(client.wanted_replica(GenerateRequest(request_id="s", affinity=name)) == wanted[name] for name in names)
    assert client.wanted_replica(GenerateRequest(request_id="r", affinity="a", replica=2)) == 2
    assert client.wanted_replica(GenerateRequest(request_id="r")) is None
    loads.alive.remove(1)
    assert {client.wanted_replica(GenerateRequest(request_id="r", affinity=name)) for name in names} == {0, 2, 3}


class Releasing:
    """A core that says what it was told; ``busy`` refuses to give memory back."""

    def __init__(self, busy: bool) -> None:
        self.busy = busy
        self.told: list[str] = []

    async def load(self) -> LoadSnapshot:
        return LoadSnapshot()

    async def release_memory(self, tags: tuple[str, ...]) -> None:
        self.told.append("release")
        if self.busy:
            raise RequestError("the engine is busy")

    async def resume_memory(self, tags: tuple[str, ...]) -> None:
        self.told.append("resume")


async def test_all_replicas_give_memory_back_or_none() -> None:
    client = ReplicaClient.__new__(ReplicaClient)
    cores: Any = [Releasing(False), Releasing(True)]
    client._loads, client._clients, client._gone, client.failure = ReplicaLoads(2), cores, set(), None
    client._snapshots = [LoadSnapshot(), LoadSnapshot()]
    with pytest.raises(RequestError, match="busy"):
        await client.release_memory(("kv_cache",))
    assert [core.told for core in cores] == [["release", "resume"]] * 2
    cores[1].busy = False
    await client.release_memory(("kv_cache",))
    assert cores[0].told[2:] == ["release"]


def test_a_part_of_a_frame_has_its_own_tokens_and_extras() -> None:
    prompts = [[1, 2, 3], [4], [5, 6]]
    submissions = [
        Submission(
            key,
            GenerateRequest(
                request_id=str(key),
                input_ids=tokens,
                sampling=SamplingParams(max_new_tokens=key, stop_token_ids=(key,)),
                embeds=PromptVectors(np.full((2, 4), key, np.float32)) if key == 9 else None,
            ),
            PreparedPrompt(np.array(tokens, dtype=np.int32), key),
        )
        for key, tokens in enumerate(prompts, start=7)
    ]
    part = select_requests(build_columns(submissions), [2, 0])
    assert part.key.tolist() == [9, 7]
    assert part.token_ids.tolist() == [5, 6, 1, 2, 3]
    assert part.num_tokens.tolist() == [2, 3]
    assert part.max_new_tokens.tolist() == [9, 7]
    assert {index: extra.stop_token_ids for index, extra in part.extras.items()} == {0: (9,), 1: (7,)}
    assert {index: matrix[0, 0] for index, matrix in part.embeds.items()} == {0: 9}
    assert part.extras[0].namespace and not part.extras[1].namespace


def test_loads_add_up() -> None:
    merged = merge_loads(
        [
            LoadSnapshot(timestamp=5, num_running=1, num_pages=8, page_size=4, cache_hit_rate=0.5, paused=True),
            LoadSnapshot(timestamp=9, num_running=2, num_pages=8, page_size=4, cache_hit_rate=0.0),
        ]
    )
    assert (merged.num_running, merged.num_pages, merged.page_size, merged.timestamp) == (3, 16, 4, 9)
    assert (merged.cache_hit_rate, merged.paused) == (0.25, True)


async def test_requests_are_spread_and_control_calls_reach_everyone(chain_model: Path) -> None:
    async with await start_engine(chain_model, "5", dp_size=2, max_total_tokens=4096) as engine:
        assert len(set(core_ids(engine))) == 2
        outputs = await asyncio.gather(*(run_to_end(engine, ask(f"t{text}", text, 10)) for text in "Aap0G"))
        assert [output.text for output in outputs] == ["BCDABCDABC", "é🙂!", "qXXrst", "123456789", "g"]
        assert await running(engine) == [0, 0]
        tasks = [asyncio.create_task(run_to_end(engine, ask(f"long{index}", "A", 1000))) for index in range(4)]
        await until(lambda: engine.num_live == 4)
        while await running(engine) != [2, 2]:
            await asyncio.sleep(0.005)
        assert (await engine.loads()).num_running == 4
        assert not await engine.flush_cache()
        assert engine.abort("long1")
        assert (await tasks[1]).finish_reason is not None
        await engine.pause("in_place")
        assert all(load.paused for _, load in await engine.replica_loads())
        await engine.resume()
        assert await engine.abort_all() == 3
        await asyncio.gather(*tasks)
        assert await engine.flush_cache(5.0)
        assert engine.look()
        wanted = [ask(f"w{index}", "A", 1000) for index in range(3)]
        for request in wanted:
            request.replica = 1
        tasks = [asyncio.create_task(run_to_end(engine, request)) for request in wanted]
        while await running(engine) != [0, 3]:
            await asyncio.sleep(0.005)
        await engine.abort_all()
        await asyncio.gather(*tasks)


async def test_a_dead_replica_takes_only_its_own_requests(chain_model: Path) -> None:
    async with await start_engine(chain_model, "5", dp_size=2, max_total_tokens=4096) as engine:
        requests = [ask(f"r{index}", "A", 400) for index in range(4)]
        for index, request in enumerate(requests):
            request.replica = index % 2
        tasks = [asyncio.create_task(run_to_end(engine, request)) for request in requests]
        while await running(engine) != [2, 2]:
            await asyncio.sleep(0.005)
        os.kill(core_ids(engine)[0], signal.SIGKILL)
        outputs = await asyncio.gather(*tasks)
        for output in outputs[::2]:
            assert output.finish_reason is not None
            assert output.finish_reason.message is not None
            assert "data parallel replica 0 is gone" in output.finish_reason.message
            assert "SIGKILL" in output.finish_reason.message
        assert [output.completion_tokens for output in outputs[1::2]] == [400, 400]
        assert engine.is_alive
        assert [replica for replica, _ in await engine.replica_loads()] == [1]
        assert (await run_to_end(engine, ask("more", "A", 3))).text == "BCD"
        lost = ask("lost", "A", 3)
        lost.replica = 0
        reason = (await run_to_end(engine, lost)).finish_reason
        assert reason is not None
        assert "replica 0 is gone" in str(reason.message)
        os.kill(core_ids(engine)[1], signal.SIGKILL)
        await until(lambda: not engine.is_alive)
        with pytest.raises(RequestError, match="SIGKILL"):
            await run_to_end(engine, ask("late", "A", 3))


async def test_one_replica_that_cannot_start_ends_the_start(chain_model: Path) -> None:
    with pytest.raises(StartupError, match="made of cheese"):
        await start_engine(chain_model, "refusal", dp_size=2)


async def test_a_replica_that_dies_during_a_control_call_spoils_it_for_nobody(chain_model: Path) -> None:
    """Its requests have ended, so the call is about the others; one that only one of them followed would be worse."""
    async with await start_engine(chain_model, "5", dp_size=2, max_total_tokens=4096) as engine:
        first = core_ids(engine)[0]
        os.kill(first, signal.SIGSTOP)  # alive, and silent
        calls = [
            asyncio.create_task(call) for call in (engine.replica_loads(), engine.pause("in_place"), engine.abort_all())
        ]
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(10):
            loads, _, aborted = await asyncio.gather(*calls)
        assert ([replica for replica, _ in loads], aborted) == ([1], 0)
        await engine.resume()
        assert (await run_to_end(engine, ask("more", "A", 3))).text == "BCD"
