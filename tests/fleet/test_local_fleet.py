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


def roll_under_load(fleet: FleetProcess) -> None:
    """SIGHUP replaces all servers; four clients that never pause lose no request."""
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


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_servers_are_replaced_and_a_killed_fleet_leaves_nothing(chain_model: Path, tmp_path: Path) -> None:
    """One is killed, then all are rolled under load, then the fleet itself is killed."""
    flags = ["--model-path", str(chain_model), "--device", "cpu", "--max-total-tokens", "4096", "--skip-server-warmup"]
    with FleetProcess(["--replicas", "2"], flags, tmp_path, {"SGLANG_LITE_API_KEY": KEY}) as fleet:
        fleet.wait_ready()
        first = fleet.workers()
        assert len(first) == 2
        assert fleet.generate() == "BCDA"
        key, fleet.key = fleet.key, "wrong"
        assert fleet.call("POST", "/generate", {"text": "A"})[0] == fleet.call("GET", "/workers")[0] == 401
        fleet.key = key

        victim = next(iter(first))
        family = family_of(victim)
        assert KEY not in " ".join(word for process in family for word in process.cmdline())
        server_at(victim).kill()
        fleet.wait_ready(2)
        second = fleet.workers()
        assert victim not in second and len(second) == 2
        wait_gone(family)
        assert {fleet.generate() for _ in range(4)} == {"BCDA"}

        roll_under_load(fleet)
        third = fleet.workers()
        assert len(third) == 2 and not set(third) & set(second)

        everything = psutil.Process(fleet.process.pid).children(recursive=True)
        assert len(everything) >= 8  # three keepers, a router, two servers with a core each
        fleet.process.kill()
        wait_gone(everything)
