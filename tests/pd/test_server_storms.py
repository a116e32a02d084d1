"""Many sessions at once, servers that die among them, clients that give up, and a network that is cut."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.support.disaggregated_pair import (
    DECODE,
    PREFILL,
    SHORT_WAITS,
    SIDES,
    Answer,
    Oracle,
    Pair,
    prompt_of,
)

IS_FULL = os.environ.get("SGLANG_LITE_FULL_MATRIX") == "1"
BACKENDS = ("tcp", "mooncake_tcp", "nixl") if IS_FULL else ("tcp",)
"""Every run kills servers under Mooncake and NIXL too: see test_server_faults.py."""

WAITS = {**SHORT_WAITS, "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "12"}
"""A busy machine needs seconds until both sides have heard of forty requests."""

STORM_SECONDS = 120.0 if IS_FULL else 10.0
AT_ONCE = 200


@pytest.fixture(scope="module", params=BACKENDS)
def pair(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(request.param, model, tmp_path_factory.mktemp("pair"), environment=WAITS)
    try:
        pair.start()
        yield pair
    finally:
        pair.close()


async def test_clients_that_give_up_leave_no_pair_waiting(pair: Pair, oracle: Oracle) -> None:
    """Nine of ten clients leave while their pages move."""
    pair.hold("half")
    prompts = [prompt_of(seed, 40) for seed in range(40)]
    calls = [pair.both(pair.body(prompt)) for prompt in prompts]
    await pair.until(PREFILL, lambda load: load["disaggregation"]["prefill_inflight_queue_reqs"] > 0)
    stay = set(range(0, len(calls), 10))
    for number, call in enumerate(calls):
        if number not in stay:
            call[random.choice(SIDES)].cancel()
    pair.open()
    for number in stay:
        answer = await asyncio.wait_for(calls[number][DECODE], 40.0)
        assert answer.tokens == oracle.tokens(prompts[number])
    gone = [task for number, call in enumerate(calls) if number not in stay for task in call.values()]
    await asyncio.wait_for(asyncio.gather(*gone, return_exceptions=True), 5.0)
    await pair.settled()


@pytest.mark.timeout(STORM_SECONDS + 200.0)
async def test_random_kills_among_many_sessions(pair: Pair, oracle: Oracle) -> None:
    """200 requests at a time, a server killed every few seconds: answers are right or say that they failed."""
    counts: Counter[str] = Counter()
    until = time.monotonic() + STORM_SECONDS
    seeds = iter(range(1_000, 1_000_000))

    async def client() -> None:
        while time.monotonic() < until:
            prompt = prompt_of(next(seeds) % 50, 30)
            calls = pair.both(pair.body(prompt, count=4))
            decoded, prefilled = await asyncio.gather(calls[DECODE], calls[PREFILL])
            counts[_judge(decoded, oracle.tokens(prompt, 4))] += 1
            _judge(prefilled, oracle.tokens(prompt, 4)[:1])
            if decoded.error:
                await asyncio.sleep(0.2)  # nobody listens at the moment

    async def killer() -> None:
        while time.monotonic() < until - 2.0:
            await asyncio.sleep(random.uniform(1.0, 3.0))
            side = pair.sides[random.choice(SIDES)]
            side.kill()
            side.start()
            counts["kills"] += 1
            await pair.wait_ready()

    for seed in range(50):
        oracle.tokens(prompt_of(seed, 30), 4)
    limit = STORM_SECONDS + 40.0
    await asyncio.wait_for(asyncio.gather(killer(), *(client() for _ in range(AT_ONCE))), limit)
    await pair.revive()
    await pair.settled(20.0)
    assert counts["kills"] >= 1, counts
    assert counts["answers"] > 0, counts
    call = pair.both(pair.body(prompt_of(1, 100)))
    assert (await call[DECODE]).tokens == oracle.tokens(prompt_of(1, 100))


def _judge(answer: Answer, expected: list[int]) -> str:
    if answer.is_failure:
        return "failures"
    assert answer.tokens == expected
    return "answers"


async def _meet_again(pair: Pair, oracle: Oracle) -> None:
    """Connections are made again within some seconds, and requests meanwhile fail clearly."""
    until = time.monotonic() + 10.0
    while True:
        answer = await pair.both(pair.body(prompt_of(9, 40)))[DECODE]
        if not answer.is_failure:
            assert answer.tokens == oracle.tokens(prompt_of(9, 40))
            return
        assert time.monotonic() < until, answer


class Networks:
    """A network namespace with two cables to it: pages go over one, which can be cut, and clients over the other.

    Attributes:
        here, there: addresses of both ends of the first cable; ``clients`` is the far end of the other.
    """

    here, there, clients = "10.177.1.1", "10.177.1.2", "10.177.2.2"

    def __init__(self) -> None:
        self.name = f"sgl{secrets.token_hex(3)}"

    def __enter__(self) -> Self:
        _ip("netns", "add", self.name)
        for letter, net in (("p", "10.177.1"), ("c", "10.177.2")):
            near, far = f"{self.name}{letter}0", f"{self.name}{letter}1"
            _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", self.name)
            _ip("addr", "add", f"{net}.1/24", "dev", near)
            _ip("link", "set", near, "up")
            _ip("-n", self.name, "addr", "add", f"{net}.2/24", "dev", far)
            _ip("-n", self.name, "link", "set", far, "up")
        _ip("-n", self.name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *exception: object) -> None:
        for words in (("link", "delete", f"{self.name}p0"), ("link", "delete", f"{self.name}c0")):
            subprocess.run(["ip", *words], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", self.name], check=False)

    def cut(self) -> None:
        _ip("link", "set", f"{self.name}p0", "down")

    def mend(self) -> None:
        _ip("link", "set", f"{self.name}p0", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


CAN_CUT = os.geteuid() == 0 and shutil.which("ip") is not None
"""Network namespaces take root and iproute2."""


@pytest.mark.skipif(not CAN_CUT, reason="needs root and iproute2 to make and cut a network")
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_network_that_is_cut(backend: str, model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """No packet says that the other side is gone: both notice it themselves, free their pages, and meet again."""
    environment = {**SHORT_WAITS, "SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT": "5"}
    with Networks() as networks:
        pair = Pair(backend, model, tmp_path, environment=environment)
        pair.bootstrap_host = networks.here
        for role, own in ((PREFILL, networks.here), (DECODE, networks.there)):
            side = pair.sides[role]
            side.words = ["0.0.0.0" if word == "127.0.0.1" else word for word in side.words]
            side.environment["SGLANG_HOST_IP"] = own
        pair.sides[DECODE].prefix = ["ip", "netns", "exec", networks.name]
        pair.sides[DECODE].host = networks.clients
        try:
            for side in pair.sides.values():
                side.start()
            await pair.wait_ready()
            calls = pair.both(pair.body(prompt_of(1, 40)))
            assert (await calls[DECODE]).tokens == oracle.tokens(prompt_of(1, 40))
            for gate in ("half", "done"):  # in the middle of the pages, and behind the last of them
                pair.hold(gate)
                calls = pair.both(pair.body(prompt_of(2, 40)))
                await pair.until(PREFILL, lambda load: load["disaggregation"]["prefill_inflight_queue_reqs"] == 1)
                networks.cut()
                ends = {role: await asyncio.wait_for(call, 12.0) for role, call in calls.items()}
                assert ends[PREFILL].is_failure
                assert ends[DECODE].is_failure or (
                    gate == "done" and ends[DECODE].tokens == oracle.tokens(prompt_of(2, 40))
                )
                answer = await pair.send(DECODE, pair.body(prompt_of(3, 40)))  # nobody can be reached now
                assert answer.is_failure
                pair.open()
                await pair.settled(30.0)
                networks.mend()
                await _meet_again(pair, oracle)
            calls = pair.both(pair.body(prompt_of(70, 40), count=900))
            await pair.until(DECODE, lambda load: load["num_running_reqs"] == 1)
            networks.cut()  # while it decodes, it needs nobody
            assert (await calls[DECODE]).tokens == oracle.tokens(prompt_of(70, 40), 900)
            await calls[PREFILL]
            await pair.settled(30.0)
            networks.mend()
            await _meet_again(pair, oracle)
            for seed in range(4, 8):
                calls = pair.both(pair.body(prompt_of(seed, 120)))
                assert (await asyncio.wait_for(calls[DECODE], 15.0)).tokens == oracle.tokens(prompt_of(seed, 120))
            await pair.settled()
        finally:
            pair.close()
