"""A fleet on this machine: real servers, a real router, and processes that are killed."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.support.fleets import FleetProcess, family_of, server_at, wait_gone

KEY = "fleet-secret"


def test_a_server_that_is_killed_is_replaced_and_a_killed_fleet_leaves_nothing(
    chain_model: Path, tmp_path: Path
) -> None:
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

        everything = psutil.Process(fleet.process.pid).children(recursive=True)
        assert len(everything) >= 8  # three keepers, a router, two servers with a core each
        fleet.process.kill()
        wait_gone(everything)
