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
from sglang_lite.fleet.spec_checks import check_own_variables
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
        ({"replicas": [{}], "drain_seconds": float("inf")}, "drain_seconds"),
        ({"replicas": [{}], "start_seconds": float("nan")}, "start_seconds"),
        ({"replicas": [{}], "targets_file": "/nowhere/at/all.json"}, "targets_file .*directory"),
        ({"replicas": [{}], "log_directory": "a\0b"}, "log_directory"),
        ({"replicas": [{"name": "../up"}]}, r"replicas\[0\].name"),
        ({"replicas": [{}, {"name": "b", "environment": {"A=B": "c"}}]}, r"replicas\[1\].environment.A=B"),
        ({"replicas": [{"environment": {"A": "b\0"}}]}, r"replicas\[0\].environment.A"),
        ({"replicas": [{"environment": {"SGLANG_LITE_PORT": "1"}}]}, "SGLANG_LITE_PORT: the fleet chooses it"),
        ({"replicas": [{"environment": {"SGLANG_LITE_GRPC_MODE": "1"}}]}, "speaks HTTP"),
        ({"replicas": [{"environment": {"SGLANG_LITE_API_KEY": "k"}}]}, "to the fleet itself"),
        ({"replicas": [{"flags": ["--model-path", "a\0"]}]}, "null character"),
        ({"replicas": [{"resources": {"gpus": 1.5}}]}, r"resources.gpus 1.5"),
        ({"replicas": [{"resources": {"cpus": float("inf")}}]}, "cpus"),
        ({"replicas": [{"resources": {"custom": {"GPU": 1}}}]}, "custom.GPU"),
        ({"replicas": [{}], "router": {"url": "router:30000"}}, "router.url"),
        ({"replicas": [{}], "router": {"url": "http://r:99999"}}, "router.url"),
        ({"replicas": [{}], "router": {"url": "http://r", "flags": "--policy random"}}, "router.flags: has no effect"),
        ({"replicas": [{}], "router": {"host": " "}}, "router.host"),
    ],
)
def test_wrong_specifications(document: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        checked_spec(document)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--policy bukket", "wrong flags"),
        ("--cache-threshold 7", "router.flags: --cache-threshold"),
        ("--por 1", "give it as router.port"),
        ("--host 127.0.0.1", "give it as router.host"),
        ("--api-key k", "SGLANG_LITE_API_KEY"),
        ("--worker-urls http://a", "--worker-urls"),
        ("--control-plane-api-keys a:b:admin:c", "--control-plane-api-keys"),
    ],
)
def test_wrong_flags_of_the_router(flags: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_LITE_API_KEY", raising=False)
    file = tmp_path / "fleet.yaml"
    file.write_text(f"replicas: [{{}}]\nrouter: {{flags: {flags}}}")
    with pytest.raises(StartupError, match=words):
        parse_options(["--spec", str(file)])
    file.write_text("replicas: [{}]\nflags: 5")
    with pytest.raises(StartupError, match="flags"):
        parse_options(["--spec", str(file), *MODEL])


def test_variables_of_the_fleet_that_its_replicas_would_have() -> None:
    check_own_variables({"SGLANG_LITE_HOST": "0.0.0.0", "SGLANG_LITE_API_KEY": "k", "SGLANG_LITE_GRPC_MODE": "0"})
    for name in ("SGLANG_LITE_GRPC_MODE", "SGLANG_LITE_DISAGGREGATION_MODE", "SGLANG_LITE_ROUTER_URL"):
        with pytest.raises(StartupError, match=name):
            check_own_variables({name: "prefill"})


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
