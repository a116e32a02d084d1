"""Servers of several tensor-parallel ranks (gloo on the host), of one size on both sides and of different ones."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sglang_lite.startup import TEST_CPU_RANKS
from tests.support.disaggregated_pair import DECODE, PREFILL, SHORT_WAITS, SIDES, Oracle, Pair, prompt_of
from tests.support.tiny_checkpoints import CASES, save_checkpoint

ENVIRONMENT = {**SHORT_WAITS, TEST_CPU_RANKS: "1"}
PROMPTS = [prompt_of(seed, length) for seed, length in enumerate((1, 16, 17, 90))]


def new_pair(model: Path, directory: Path, prefill_size: int, decode_size: int) -> Pair:
    """Servers with that many ranks each, not started."""
    directory.mkdir()
    return Pair(
        "tcp",
        model,
        directory,
        gated=False,
        environment=ENVIRONMENT,
        options=("--tp-size", str(prefill_size), "--chunked-prefill-size", "32"),
        decode_options=("--tp-size", str(decode_size)),
    )


class Servers:
    """Prefill and decode servers of one and of two ranks; every pair of them serves."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._made = new_pair(model, directory / "1-2", 1, 2), new_pair(model, directory / "2-1", 2, 1)
        for pair in self._made:
            for side in pair.sides.values():
                side.start()
        for pair in self._made:
            asyncio.run(pair.wait_ready())

    def pair(self, prefill_size: int, decode_size: int) -> Pair:
        """The servers of those sizes."""
        prefill, decode = self._made[prefill_size - 1], self._made[2 - decode_size]
        pair = copy.copy(prefill)
        pair.sides = {PREFILL: prefill.sides[PREFILL], DECODE: decode.sides[DECODE]}
        return pair

    def close(self) -> None:
        for pair in self._made:
            pair.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two key/value heads."""
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint(CASES["qwen3"], directory)
    return directory


@pytest.fixture(scope="module")
def oracle(model: Path) -> Iterator[Oracle]:
    with Oracle.of(model) as oracle:
        yield oracle


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with contextlib.closing(Servers(model, tmp_path_factory.mktemp("servers"))) as made:
        yield made


async def check_answers(pair: Pair, oracle: Oracle) -> None:
    """Prompts of less than a page, of whole pages and of several chunks, all at once, are answered as by one server."""
    calls = [pair.both(pair.body(prompt, count=12)) for prompt in PROMPTS]
    for prompt, call in zip(PROMPTS, calls, strict=True):
        prefilled, decoded = await call[PREFILL], await call[DECODE]
        assert (prefilled.status, decoded.status) == (200, 200), (prefilled, decoded)
        assert decoded.tokens == oracle.tokens(prompt, 12)
        assert prefilled.tokens == decoded.tokens[:1]
    await pair.settled()


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(1, 2), (2, 1), (2, 2)])
async def test_ranks_say_what_one_server_says(
    servers: Servers, oracle: Oracle, prefill_size: int, decode_size: int
) -> None:
    await check_answers(servers.pair(prefill_size, decode_size), oracle)


async def moved(pair: Pair) -> tuple[int, int]:
    """Spans and bytes that all ranks of the prefill server have sent. The others tell theirs every now and then."""
    seen, since = (-1, -1), time.monotonic()
    while time.monotonic() - since < 0.6:
        load = (await pair.loads(PREFILL))["disaggregation"]
        if (load["spans"], load["bytes"]) != seen:
            seen, since = (load["spans"], load["bytes"]), time.monotonic()
        await asyncio.sleep(0.05)
    return seen


@pytest.mark.parametrize(("prefill_size", "decode_size", "spans"), [(2, 2, 2 * 5), (1, 2, 2 * 5 * 2 * 2 * 16)])
async def test_one_span_a_page_and_rank_where_sizes_are_equal(
    servers: Servers, prefill_size: int, decode_size: int, spans: int
) -> None:
    """Else one for every layer, keys and values, and token, since heads lie within tokens. The bytes are the same."""
    pair = servers.pair(prefill_size, decode_size)
    spans_before, bytes_before = await moved(pair)
    call = pair.both(pair.body(prompt_of(31, 70), count=1))
    assert (await call[DECODE]).status == 200
    await pair.settled()
    spans_after, bytes_after = await moved(pair)
    assert spans_after - spans_before == spans
    assert bytes_after - bytes_before == 5 * 16 * 1024


async def test_a_client_that_leaves_gives_all_ranks_their_pages_back(servers: Servers, oracle: Oracle) -> None:
    pair = servers.pair(2, 2)
    body = pair.body(prompt_of(33, 40), count=100)
    call = asyncio.create_task(pair.send(DECODE, body))
    await pair.until(DECODE, lambda load: load["disaggregation"]["decode_transfer_queue_reqs"] == 1)
    call.cancel()
    answer = await pair.send(PREFILL, body)
    assert answer.is_failure, answer
    await pair.settled()
    await check_answers(pair, oracle)


async def kill_a_rank(pair: Pair, role: str, seed: int) -> None:
    """In the middle of a transfer, which needs it: clients of both sides hear of it, and the other side goes on."""
    process = pair.sides[role].process
    assert process is not None
    children = psutil.Process(process.pid).children(recursive=True)
    rank = next(child for child in children if "rank_process" in " ".join(child.cmdline()))
    rank.send_signal(signal.SIGSTOP)
    calls = pair.both(pair.body(prompt_of(seed, 40)))
    await pair.until(DECODE, lambda load: load["disaggregation"]["decode_transfer_queue_reqs"] == 1)
    began = time.monotonic()
    rank.kill()
    for side in SIDES:
        answer = await calls[side]
        assert answer.is_failure, (side, answer)
    assert time.monotonic() - began < 5.0
    other = PREFILL if role == DECODE else DECODE
    await pair.until(other, lambda load: load["num_used_tokens"] == 0 and load["num_reqs"] == 0)
    assert process.wait(10) != 0


async def test_a_dead_rank_fails_its_requests_on_both_sides(servers: Servers, oracle: Oracle) -> None:
    """Comes last: the servers with two ranks end here."""
    await kill_a_rank(servers.pair(2, 2), DECODE, 32)
    await check_answers(servers.pair(2, 1), oracle)
    await kill_a_rank(servers.pair(2, 1), PREFILL, 34)
    await check_answers(servers.pair(1, 1), oracle)


def test_latent_rows_go_to_every_rank(tmp_path: Path) -> None:
    """A decode rank needs all of a row, whatever its heads and experts; servers that end say goodbye."""
    save_checkpoint(CASES["deepseek_v3"], tmp_path)
    pair = new_pair(tmp_path, tmp_path / "logs", 1, 2)
    pair.sides[DECODE].words += ["--ep-size", "2"]
    with Oracle.of(tmp_path) as oracle, contextlib.closing(pair):
        pair.start()
        asyncio.run(check_answers(pair, oracle))
        for side in (pair.sides[DECODE], pair.sides[PREFILL]):
            assert side.terminate() < 10.0
            assert side.process is not None and side.process.returncode == 0
            assert "Traceback" not in side.log.read_text()
