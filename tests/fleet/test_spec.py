"""What a specification and a command line may say."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_lite.fleet.options import parse_options
from sglang_lite.fleet.ray_backend import RayBackend
from sglang_lite.fleet.spec import Group, RaySettings, Resources, checked_spec, flags_of
from sglang_lite.types import StartupError

MODEL = ["--", "--model-path", "m"]


def test_a_command_line() -> None:
    words = ["--backend", "ray", "--prefill", "2", "--decode", "3", "--gpus", "1", "--router-port", "8000", *MODEL]
    spec = parse_options(words).spec
    assert spec.backend == "ray" and spec.has_pairs and spec.router.port == 8000
    assert spec.replicas == [
        Group(role="prefill", count=2, resources=Resources(gpus=1)),
        Group(role="decode", count=3, resources=Resources(gpus=1)),
    ]
    assert flags_of(spec.flags) == ["--model-path", "m"]


def test_a_file_and_a_command_line_over_it(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        """
backend: ray
ray: {address: "10.0.0.1:6379", runtime_env: {env_vars: {A: b}}}
router: {url: "http://router:30000"}
flags: --model-path 'a b' --device cpu
drain_seconds: 5
replicas:
  - {name: big, count: 2, flags: [--page-size, "64"], environment: {X: "1"}, resources: {cpus: 8, custom: {fast: 1}}}
  - {name: small, count: 1}
"""
    )
    options = parse_options(
        ["--spec", str(file), "--backend", "local", "--drain-seconds", "7", "--", "--enable-metrics"]
    )
    spec = options.spec
    assert (spec.backend, spec.drain_seconds, spec.router.url) == ("local", 7, "http://router:30000")
    assert spec.ray == RaySettings(address="10.0.0.1:6379", runtime_env={"env_vars": {"A": "b"}})
    assert flags_of(spec.flags) == ["--model-path", "a b", "--device", "cpu", "--enable-metrics"]
    assert [group.title for group in spec.replicas] == ["big", "small"]
    assert spec.replicas[0].resources == Resources(cpus=8, custom={"fast": 1})
    assert parse_options(options.words).spec == spec


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "no replicas"),
        ({"replicas": [{"count": 0}]}, "no replicas"),
        ({"replicas": [{"role": "prefill"}]}, "only prefill ones"),
        ({"replicas": [{"role": "prefill"}, {"role": "decode"}, {}]}, "do not go together"),
        ({"replicas": [{}, {}]}, "two groups are called 'plain'"),
        ({"replicas": [{"count": -1}]}, r"\$.replicas\[0\].count"),
        ({"replicas": [{"role": "both"}]}, "both"),
        ({"replicas": [{}], "backend": "k8s"}, "k8s"),
        ({"replicas": [{}], "drian_seconds": 3}, "drian_seconds"),
        ({"replicas": [{"resources": {"gpu": 1}}]}, "gpu"),
        ({"replicas": [{"flags": "--model-path 'x"}]}, "quotation"),
        ({"replicas": [{"flags": "--port 1"}]}, "--port: the fleet chooses it"),
        ({"replicas": [{"flags": "--por=1"}]}, "--port: the fleet chooses it"),
        ({"flags": "--disaggregation-mode prefill", "replicas": [{}]}, "the fleet chooses it"),
        ({"flags": ["--api-key", "x"], "replicas": [{}]}, "SGLANG_LITE_API_KEY"),
        ({"flags": ["--nnodes", "2"], "replicas": [{}]}, "one machine"),
        ({"flags": ["--page-size", "none"], "replicas": [{}]}, "wrong flags"),
    ],
)
def test_wrong_specifications(document: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        checked_spec(document)


def test_counts_are_given_in_one_place(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("replicas: [{count: 2}]")
    with pytest.raises(StartupError, match="--replicas"):
        parse_options(["--spec", str(file), "--replicas", "3"])
    with pytest.raises(StartupError, match="--cpus"):
        parse_options(["--spec", str(file), "--gpus", "3"])
    file.write_text("- 1")
    with pytest.raises(StartupError, match="must hold a mapping"):
        parse_options(["--spec", str(file)])
    with pytest.raises(StartupError, match="cannot read"):
        parse_options(["--spec", str(tmp_path / "none")])


async def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StartupError, match=r"pip install 'sglang-lite\[ray\]'"):
        await RayBackend(RaySettings()).open()


@pytest.mark.parametrize(
    ("address", "words"),
    [("127.0.0.1:1", "cannot reach a Ray cluster: .*ray start --head"), ("ray://127.0.0.1:10001", "HOST:PORT")],
)
async def test_a_cluster_that_is_not_there(address: str, words: str) -> None:
    """Known at once, not after Ray has tried for minutes."""
    async with asyncio.timeout(20):
        with pytest.raises(StartupError, match=words):
            await RayBackend(RaySettings(address=address)).open()
