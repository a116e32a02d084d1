"""Either server dies or stops at every stage of a request, over every transfer engine.

Whatever happens: every client has an answer or a clear error in time, the servers that live give all pages back, no
page is written after it was handed on, and the next request works. ``SGLANG_LITE_FAULT_TABLE=FILE`` writes what
happened as a Markdown table; ``SGLANG_LITE_FULL_MATRIX=1``, for a machine that does nothing else, also demands that
nobody takes a moment for an end.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
BACKENDS = ("tcp", "mooncake_tcp", "nixl")
STAGES = ("before registration", "bootstrapping", "mid-transfer", "after the last byte", "decoding")
FAULTS = ("kill -9", "SIGSTOP 1 s", "SIGSTOP 4 s")
LIMIT = 12.0 if IS_FULL else 40.0
"""Seconds within which every client of a case must have its answer; the waits of both servers are 4 to 8."""

_MOVING = ("mid-transfer", "after the last byte")


@dataclass(frozen=True, slots=True)
class Case:
    backend: str
    stage: str
    fault: str
    victim: str

    def __str__(self) -> str:
        return "-".join((self.backend, self.stage, self.fault, self.victim)).replace(" ", "_")


@dataclass(frozen=True, slots=True)
class Row:
    """What happened, for the table."""

    case: Case
    outcome: str
    answered: float
    settled: float


def cases() -> list[Case]:
    return [
        Case(backend, stage, fault, victim)
        for backend in BACKENDS
        for stage in STAGES
        for fault in FAULTS
        for victim in SIDES
    ]


ROWS: list[Row] = []


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    path = os.environ.get("SGLANG_LITE_FAULT_TABLE")
    if path and ROWS:
        Path(path).write_text(_table(ROWS))


def _table(rows: list[Row]) -> str:
    lines = [
        "# What happens when a server of a pair dies",
        "",
        "Written by `tests/pd/test_server_faults.py` with real servers: a request is brought to a stage, one side is",
        "killed or stopped there, and then the next requests must be right. A peer is given up after 2 s of silence",
        "and a partner that never comes after 4 s (the defaults are longer); a client of a server that is killed sees",
        "its connection end. Seconds count from the fault, and answers are looked at when a stop is over.",
        "[How to run it](disaggregation.md).",
        "",
        "| transfers | stage | fault | of | what the client of decode got | answered after | pages back after |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        case = row.case
        lines.append(
            f"| {case.backend} | {case.stage} | {case.fault} | {case.victim} | {row.outcome} | {row.answered:.1f} s "
            f"| {row.settled:.1f} s |"
        )
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(request.param, model, tmp_path_factory.mktemp("pair"), environment=SHORT_WAITS)
    try:
        pair.start()
        yield pair
    finally:
        pair.close()


async def reach(pair: Pair, case: Case, count: int) -> dict[str, asyncio.Task[Answer]]:
    """Bring a request to a stage; who has been asked."""
    survivor = DECODE if case.victim == PREFILL else PREFILL
    body = pair.body(prompt_of(70, 40), count=count)
    if case.stage == "before registration":
        return {}
    if case.stage == "bootstrapping":
        name = "decode_transfer_queue_reqs" if survivor == DECODE else "prefill_bootstrap_queue_reqs"
        calls = {survivor: asyncio.create_task(pair.send(survivor, body))}
        await pair.until(survivor, lambda load: load["disaggregation"][name] == 1)
        return calls
    if case.stage in _MOVING:
        pair.hold("half" if case.stage == "mid-transfer" else "done")
        calls = pair.both(body)
        await pair.until(PREFILL, lambda load: load["disaggregation"]["prefill_inflight_queue_reqs"] == 1)
        return calls
    calls = pair.both(body)
    await pair.until(DECODE, lambda load: load["num_running_reqs"] == 1)
    return calls


async def afflict(pair: Pair, case: Case, calls: dict[str, asyncio.Task[Answer]]) -> None:
    """Let the fault happen, and the request be made where it comes after it."""
    victim = pair.sides[case.victim]
    if case.fault == "kill -9":
        victim.kill()
        return
    victim.signal(signal.SIGSTOP)
    await asyncio.sleep(float(case.fault.split()[1]))
    victim.signal(signal.SIGCONT)
    await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("pair", "case"),
    [pytest.param(case.backend, case, id=str(case)) for case in cases()],
    indirect=["pair"],
    scope="module",
)
async def test_fault(pair: Pair, oracle: Oracle, case: Case) -> None:
    await pair.revive()
    await pair.settled()
    count = 900 if case.stage == "decoding" else 8
    calls = await reach(pair, case, count)
    began = time.monotonic()
    await afflict(pair, case, calls)
    if case.stage == "before registration":
        calls = pair.both(pair.body(prompt_of(70, 40)))
    pair.open()
    answers = {role: await asyncio.wait_for(call, LIMIT) for role, call in calls.items()}
    answered = time.monotonic() - began
    for role, answer in answers.items():
        wanted = oracle.tokens(prompt_of(70, 40), count)[: 1 if role == PREFILL else count]
        assert answer.is_failure or answer.tokens == wanted, (role, answer)
    if case.stage == "decoding" and case.victim == PREFILL:
        assert not answers[DECODE].is_failure  # it needs nobody any more
    if IS_FULL and case.fault == "SIGSTOP 1 s" and case.stage != "bootstrapping":
        assert not any(answer.is_failure for answer in answers.values()), answers  # a moment is not an end
    settled = await pair.settled()
    decoded = answers.get(DECODE)
    ROWS.append(Row(case, _outcome(decoded), answered, settled))
    await check_next(pair, oracle)


def _outcome(answer: Answer | None) -> str:
    if answer is None:
        return "not asked"
    if not answer.is_failure:
        return "its answer"
    return "connection closed" if answer.error else f"error {answer.status}"


async def check_next(pair: Pair, oracle: Oracle) -> None:
    """Fill the pools with other prompts: bytes that come late would be in them."""
    await pair.revive()
    prompts = [prompt_of(random.randrange(100, 10_000), 120) for _ in range(4)]
    calls = [pair.both(pair.body(prompt)) for prompt in prompts]
    for prompt, call in zip(prompts, calls, strict=True):
        answer = await asyncio.wait_for(call[DECODE], LIMIT)
        assert not answer.is_failure, answer
        assert answer.tokens == oracle.tokens(prompt)
        assert not (await call[PREFILL]).is_failure
    await pair.settled()
