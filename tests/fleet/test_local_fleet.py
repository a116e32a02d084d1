"""A fleet on this machine: real servers, a real router, and processes that are killed."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import psutil
import pytest

from tests.support.fleets import FleetProcess, family_of, server_at, wait_gone

KEY = "fleet-secret"


def flags(model: Path) -> list[str]:
    return ["--model-path", str(model), "--device", "cpu", "--max-total-tokens", "4096", "--skip-server-warmup"]


def test_replicas_are_replaced_rolled_and_gone_at_the_end(chain_model: Path, tmp_path: Path) -> None:
    with FleetProcess(["--replicas", "2"], flags(chain_model), tmp_path, {"SGLANG_LITE_API_KEY": KEY}) as fleet:
        fleet.wait_ready()
        first = fleet.workers()
        assert len(first) == 2
        assert fleet.generate() == "BCDA"
        assert KEY not in " ".join(word for url in first for one in family_of(url) for word in one.cmdline())

        victim = next(iter(first))
        family = family_of(victim)
        server_at(victim).kill()
        fleet.wait_ready(2)
        second = fleet.workers()
        assert victim not in second and len(second) == 2
        wait_gone(family)
        assert {fleet.generate() for _ in range(4)} == {"BCDA"}

        _roll_under_load(fleet)
        third = fleet.workers()
        assert len(third) == 2 and not set(third) & set(second)

        everything = psutil.Process(fleet.process.pid).children(recursive=True)
        assert len(everything) >= 8  # three keepers, a router, two servers with a core each
        assert fleet.stop() == 0, fleet.output
        wait_gone(everything)


def _roll_under_load(fleet: FleetProcess) -> None:
    """A rolling restart loses no request of four clients that never pause."""
    done = Event()

    def client() -> int:
        count = 0
        while not done.is_set():
            assert fleet.generate(tokens=8) == "BCDABCDA"
            count += 1
        return count

    with ThreadPoolExecutor(4) as clients:
        running = [clients.submit(client) for _ in range(4)]
        try:
            fleet.process.send_signal(signal.SIGHUP)
            fleet.until(lambda: "all replicas are replaced" in fleet.output)
        finally:
            done.set()
        assert all(one.result() > 0 for one in running)


def test_a_fleet_that_is_killed_leaves_nothing(chain_model: Path, tmp_path: Path) -> None:
    with FleetProcess(["--replicas", "1"], flags(chain_model), tmp_path) as fleet:
        fleet.wait_ready()
        everything = psutil.Process(fleet.process.pid).children(recursive=True)
        fleet.process.kill()
        wait_gone(everything)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--device", "cpu", "--page-size", "-3"], "--page-size"),
        (["--port=1"], "the fleet chooses it"),
        (["--por", "1"], "--port: the fleet chooses it"),
        (["--api-key", "x"], "SGLANG_LITE_API_KEY"),
    ],
)
def test_wrong_flags_end_the_start(extra: list[str], message: str, tmp_path: Path) -> None:
    with FleetProcess(["--replicas", "1"], ["--model-path", str(tmp_path), *extra], tmp_path) as fleet:
        assert fleet.process.wait(timeout=30) == 1
        assert message in fleet.output


def test_a_model_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    """Five attempts would be in vain; the first one says so for wrong options, the fifth for anything else."""
    with FleetProcess(["--replicas", "1"], ["--device", "cpu"], tmp_path) as fleet:
        assert fleet.process.wait(timeout=30) == 1
        assert "plain-0 does not start: the server exited with code 2" in fleet.output
