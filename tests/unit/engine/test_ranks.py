"""Replicas of several processes: what clients see when a rank dies, and ranks of a node without a front."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_lite import Engine
from sglang_lite.config import ServerConfig
from sglang_lite.engine.async_engine import AsyncEngine
from sglang_lite.execution.rank_launch import fingerprint
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.startup import TEST_CPU_RANKS
from sglang_lite.types import RequestError, SamplingParams
from tests.support.server import free_port
from tests.support.tiny_checkpoints import CASES, save_checkpoint

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    save_checkpoint(CASES["qwen3"], directory)
    return directory


@pytest.fixture(autouse=True)
def _ranks_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEST_CPU_RANKS, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def options(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model_path": str(model),
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_total_tokens": 1024,
        "max_running_requests": 4,
        **more,
    }


def ask(name: str, max_new_tokens: int = 8) -> GenerateRequest:
    sampling = SamplingParams(temperature=0, max_new_tokens=max_new_tokens, ignore_eos=True)
    return GenerateRequest(request_id=name, input_ids=PROMPT, sampling=sampling, stream=True)


async def finish(engine: AsyncEngine, request: GenerateRequest) -> Any:
    return [output async for output in engine.generate(request)][-1]


def ranks_of(engine: AsyncEngine) -> list[psutil.Process]:
    return psutil.Process(engine.info.process_id).children()


async def wait_for_death(engine: AsyncEngine) -> None:
    async with asyncio.timeout(20):
        while engine.is_alive:
            await asyncio.sleep(0.01)


async def test_a_rank_killed_while_it_computes_ends_every_request_with_its_name(model: Path) -> None:
    async with await AsyncEngine.start(ServerConfig(**options(model, tp_size=2)), timeout=60) as engine:
        (rank,) = ranks_of(engine)
        streams = [engine.generate(ask(f"r{index}", 240)) for index in range(3)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        rank.send_signal(signal.SIGKILL)
        reasons = []
        for stream in streams:
            reasons.append([output async for output in stream][-1].finish_reason)
        for reason in reasons:
            assert reason is not None
            assert reason.type == "abort"
            assert reason.message is not None
            assert "tensor parallel rank 1" in reason.message
            assert "SIGKILL" in reason.message
        with pytest.raises(RequestError, match="tensor parallel rank 1"):
            await finish(engine, ask("late"))


async def test_a_rank_killed_while_nothing_runs_ends_the_replica(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tempfile.mkdtemp(prefix="sgl-")
    monkeypatch.setattr(tempfile, "tempdir", own)
    async with await AsyncEngine.start(ServerConfig(**options(model, tp_size=2)), timeout=60) as engine:
        await finish(engine, ask("first"))
        (rank,) = ranks_of(engine)
        rank.send_signal(signal.SIGKILL)
        await wait_for_death(engine)
        assert engine.failure is not None
        assert "tensor parallel rank 1" in engine.failure
        assert "SIGKILL" in engine.failure
    os.rmdir(own)  # it is empty


async def test_nothing_is_left_of_a_core_killed_together_with_its_ranks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody but the front can remove anything then. The paths of sockets are short, pytest's are not."""
    own = tempfile.mkdtemp(prefix="sgl-")
    monkeypatch.setattr(tempfile, "tempdir", own)
    async with await AsyncEngine.start(ServerConfig(**options(model, tp_size=2)), timeout=60) as engine:
        (private,) = Path(own).iterdir()
        assert list(private.glob("sglang-lite-ranks-*"))
        (rank,) = ranks_of(engine)
        core = psutil.Process(engine.info.process_id)
        for process in (core, rank):
            process.suspend()
        for process in (rank, core):
            process.kill()
        await wait_for_death(engine)
    os.rmdir(own)  # it is empty


async def test_the_ranks_leave_with_a_killed_core(model: Path) -> None:
    async with await AsyncEngine.start(ServerConfig(**options(model, tp_size=2)), timeout=60) as engine:
        (rank,) = ranks_of(engine)
        os.kill(engine.info.process_id, signal.SIGKILL)
        await asyncio.to_thread(rank.wait, 20)


def start_node(model: Path, address: str, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "sglang_lite", "serve", "--model-path", str(model), "--device", "cpu"]
    command += ["--skip-tokenizer-init", "--max-total-tokens", "1024", "--max-running-requests", "4"]
    command += ["--tp-size", "2", "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", address, *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


async def test_two_nodes_answer_as_one_and_a_lost_node_ends_the_replica(model: Path) -> None:
    with Engine(**options(model)) as engine:
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        expected = engine.generate(input_ids=PROMPT, sampling_params=sampling)["output_ids"]
    address = free_address()
    node = start_node(model, address)
    try:
        config = ServerConfig(**options(model, tp_size=2, nnodes=2, dist_init_addr=address))
        async with await AsyncEngine.start(config, timeout=60) as engine:
            assert not ranks_of(engine), "rank 1 runs on the other node"
            assert (await finish(engine, ask("two"))).output_ids == expected
            for process in psutil.Process(node.pid).children():
                process.send_signal(signal.SIGKILL)
            await wait_for_death(engine)
            assert engine.failure is not None
            assert "tensor parallel rank 1 on another node is gone" in engine.failure
        _, text = await asyncio.to_thread(node.communicate, timeout=20)
        assert node.returncode == 1
        assert b"tensor parallel rank 1 on node 1 ended with code -9" in text
    finally:
        node.kill()
        node.wait()


async def test_a_node_ends_with_the_front(model: Path) -> None:
    address = free_address()
    node = start_node(model, address)
    try:
        config = ServerConfig(**options(model, tp_size=2, nnodes=2, dist_init_addr=address))
        async with await AsyncEngine.start(config, timeout=60) as engine:
            await finish(engine, ask("one"))
        await asyncio.to_thread(node.communicate, timeout=20)
        assert node.returncode == 0
    finally:
        node.kill()
        node.wait()


def test_nodes_of_another_model_or_options_have_another_fingerprint(model: Path, tmp_path: Path) -> None:
    config = ServerConfig(**options(model, tp_size=2))
    assert fingerprint(config.resolved(node_rank=1, port=1)) == fingerprint(config)
    assert fingerprint(config.resolved(page_size=8)) != fingerprint(config)
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint(config.resolved(model_path=str(tmp_path))) != fingerprint(config)
