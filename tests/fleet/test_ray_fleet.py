"""A fleet on a Ray cluster of two nodes, which are both this machine under different addresses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.fleets import FleetProcess, family_of, wait_gone
from tests.support.server import ROOT

_OBJECT_STORE = 80 * 2**20


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes with two CPUs each."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the nodes import what is tested
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": _OBJECT_STORE, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={**node, "node_ip_address": "127.0.0.2"})
    try:
        made.other = made.add_node(**node, node_ip_address="127.0.0.3")
        yield made
    finally:
        made.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_pairs_on_two_nodes(cluster: Any, chain_model: Path, tmp_path: Path) -> None:
    """Placed on both nodes; an actor that is killed and a node that is lost are replaced; nothing is left."""
    arguments = ["--backend", "ray", "--ray-address", cluster.address, "--prefill", "1", "--decode", "1"]
    flags = ["--model-path", str(chain_model), "--device", "cpu", "--max-total-tokens", "4096"]
    with FleetProcess(
        arguments, [*flags, "--disaggregation-transfer-backend", "tcp"], tmp_path, {"RAY_USAGE_STATS_ENABLED": "0"}
    ) as fleet:
        fleet.wait_ready()
        first = fleet.workers()
        assert sorted(worker["worker_type"] for worker in first.values()) == ["decode", "prefill"]
        assert {urlsplit(url).hostname for url in first} == {"127.0.0.2", "127.0.0.3"}
        assert fleet.generate() == "BCDA"

        victim = next(url for url in first if urlsplit(url).hostname == "127.0.0.2")
        family = family_of(victim)
        actor = family[0].parent()
        assert actor is not None and "ray" in " ".join(actor.cmdline())
        actor.kill()
        fleet.wait_ready(2)
        wait_gone([actor, *family])
        second = fleet.workers()
        assert victim not in second and len(second) == 2
        assert fleet.generate() == "BCDA"

        away = [one for url in second if urlsplit(url).hostname == "127.0.0.3" for one in family_of(url)]
        assert away
        cluster.remove_node(cluster.other, allow_graceful=False)
        fleet.wait_ready(3)
        wait_gone(away)
        third = fleet.workers()
        assert {urlsplit(url).hostname for url in third} == {"127.0.0.2"} and len(third) == 2
        assert fleet.generate() == "BCDA"

        everything = [one for url in third for one in family_of(url)]
        assert fleet.stop() == 0, fleet.output
        wait_gone(everything)
