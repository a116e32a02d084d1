"""The two processes: starting, refusing, idling, and noticing each other's death."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from sglang_lite.engine.client import EngineClient
from sglang_lite.engine.launcher import CoreProcess, describe_exit
from sglang_lite.types import RequestError, StartupError
from tests.unit.engine.conftest import ask, null_core, run, run_to_end, start_engine, until, until_idle

IDLE_SECONDS = 4.0


def _client(progress: list[str] | None = None) -> EngineClient:
    def note(message: str, fraction: float) -> None:
        if progress is not None:
            progress.append(message)

    return EngineClient(note)


def _config(model: Path) -> str:
    from sglang_lite.config import ServerConfig

    return ServerConfig(model_path=str(model), device="cpu").to_json()


async def test_ready_comes_with_facts_and_progress(chain_model: Path) -> None:
    progress: list[str] = []
    client = _client(progress)
    info = await client.start(_config(chain_model), timeout=60, command=null_core())
    assert progress == ["pretending to load"]
    assert info.process_id == client.process_id
    assert info.startup_seconds["total"] > 0
    await client.ping(5.0)
    await client.close()


async def test_a_refused_configuration_is_a_startup_error(chain_model: Path) -> None:
    with pytest.raises(StartupError, match="made of cheese"):
        await start_engine(chain_model, "refusal")


async def test_a_core_that_dies_while_starting_is_a_startup_error(chain_model: Path) -> None:
    with pytest.raises(StartupError, match="exited with code 3 before it was ready"):
        await _client().start(_config(chain_model), timeout=60, command=(sys.executable, "-c", "raise SystemExit(3)"))


async def test_a_core_that_never_gets_ready_is_ended(chain_model: Path) -> None:
    before = psutil.Process().children()
    silent = (sys.executable, "-c", "import sys; sys.stdin.read()")
    with pytest.raises(StartupError, match="not ready within"):
        await _client().start(_config(chain_model), timeout=0.3, command=silent)
    assert psutil.Process().children() == before


async def test_killing_the_core_answers_every_pending_request(chain_model: Path) -> None:
    async with await start_engine(chain_model, "1") as engine:
        tasks = [asyncio.create_task(run_to_end(engine, ask(f"r{i}", "A", None, stream=i % 2 == 0))) for i in range(8)]
        await until(lambda: engine.num_live == 8)
        os.kill(engine.info.process_id, signal.SIGKILL)
        started = time.perf_counter()
        async with asyncio.timeout(2):
            outputs = await asyncio.gather(*tasks)
        assert time.perf_counter() - started < 1.0
        for output in outputs:
            assert output.finish_reason is not None
            assert (output.finish_reason.type, output.finish_reason.status_code) == ("abort", 500)
            assert "SIGKILL" in (output.finish_reason.message or "")
        assert not engine.is_alive
        assert "SIGKILL" in (engine.failure or "")
        with pytest.raises(RequestError) as refused:
            await run(engine, ask("later"))
        assert refused.value.status == 503
        with pytest.raises(RequestError):
            await engine.loads()
        assert not engine.abort("r0")


async def test_a_fault_of_the_engine_is_told_to_every_client(chain_model: Path) -> None:
    async with await start_engine(chain_model, "fault") as engine:
        async with asyncio.timeout(20):
            output = await run_to_end(engine, ask("victim"))
        assert output.finish_reason is not None
        assert output.finish_reason.status_code == 500
        assert "engine core failed" in (output.finish_reason.message or "")
        assert not engine.is_alive


async def test_a_step_that_never_returns_ends_the_core(chain_model: Path) -> None:
    async with await start_engine(chain_model, "600000", watchdog_timeout=0.2) as engine:
        async with asyncio.timeout(20):
            output = await run_to_end(engine, ask("stuck"))
        assert output.finish_reason is not None
        assert "did not return" in (output.finish_reason.message or "")


async def test_the_core_leaves_when_the_front_is_killed(chain_model: Path) -> None:
    front = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.unit.engine.front_that_dies",
        str(chain_model),
        stdout=asyncio.subprocess.PIPE,
    )
    assert front.stdout is not None
    async with asyncio.timeout(60):
        core_id, directory = (await front.stdout.readline()).decode().split()
    core = psutil.Process(int(core_id))
    front.kill()
    await front.wait()
    await until(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE, 2.0)
    assert not Path(directory).exists()


async def test_interrupts_of_the_group_are_left_to_the_front(chain_model: Path) -> None:
    async with await start_engine(chain_model) as engine:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine.info.process_id, number)
        assert (await run_to_end(engine, ask("after", "A", 3))).text == "BCD"


async def test_malformed_frames_do_not_disturb_the_core(chain_model: Path) -> None:
    async with await start_engine(chain_model) as engine:
        client: Any = engine._client
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(client._process.ingress)
        for frame in ([b""], [b"\x93\x01"], [b"noise", b"more"], [b"\x92\xa5admit\x05", b"", b""]):
            socket.send_multipart(frame)
        assert (await run_to_end(engine, ask("fine", "A", 3))).text == "BCD"
        socket.close(0)
        context.term()


async def test_both_processes_idle_and_wake_up_at_once(chain_model: Path) -> None:
    async with await start_engine(chain_model) as engine:
        await run(engine, ask("warm"))
        await until_idle(engine)
        await asyncio.sleep(1.1)  # the last load report is sent within a second of the work
        processes = [psutil.Process(), psutil.Process(engine.info.process_id)]
        before = sum(_seconds(process) for process in processes)
        await asyncio.sleep(IDLE_SECONDS)
        assert sum(_seconds(process) for process in processes) - before < 0.02 * IDLE_SECONDS
        started = time.perf_counter()
        await run(engine, ask("wake", "A", 1))
        assert time.perf_counter() - started < 0.1


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def test_a_socket_directory_is_private_and_removed(chain_model: Path) -> None:
    process = CoreProcess(_config(chain_model), (sys.executable, "-c", "import sys; sys.stdin.read()"))
    codes: list[int] = []
    await process.start(codes.append)
    assert Path(process.directory).stat().st_mode & 0o777 == 0o700
    await process.close(grace=0.0)
    assert codes == [0]
    assert not Path(process.directory).exists()


def test_exit_codes_are_described() -> None:
    assert describe_exit(-9) == "engine core was killed by signal 9 (SIGKILL)"
    assert describe_exit(70) == "engine core exited with code 70"
