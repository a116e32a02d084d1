"""``ops/compose.yaml``: read by the types of the Compose specification, and run past our own parsers."""

from __future__ import annotations

import re
from typing import Any

import yaml
from compose_spec import PyCompose

from sglang_lite.configuration.loading import load_config
from sglang_lite.router.options import parse_options
from tests.support.server import ROOT

PATH = ROOT / "ops/compose.yaml"
GIVEN = {"MODEL": "/models/qwen3", "GRAFANA_PASSWORD": "x"}


def filled(text: str, given: dict[str, str]) -> str:
    """``text`` with its variables, as Compose fills them in."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match["name"], match["operator"], match["rest"]
        if given.get(name):
            return given[name]
        assert operator == ":-", f"{name} has to be given: {rest}"
        return str(rest)

    return re.sub(r"\$\{(?P<name>\w+)(?P<operator>:[-?])(?P<rest>[^}]*)\}", value, text)


def services() -> dict[str, Any]:
    document = yaml.safe_load(filled(PATH.read_text(), GIVEN))
    found: dict[str, Any] = document["services"]
    return found


def test_the_specification_reads_it() -> None:
    document = yaml.safe_load(filled(PATH.read_text(), GIVEN))
    for name in [name for name in document if name.startswith("x-")]:
        del document[name]
    compose = PyCompose.from_yaml(yaml.safe_dump(document))
    compose.validate()
    assert set(compose.service_names()) == {"prefill", "decode", "router", "prometheus", "grafana"}


def test_servers_and_router_understand_their_words() -> None:
    found = services()
    for role in ("prefill", "decode"):
        words = found[role]["command"]
        assert words[0] == "serve"
        config = load_config(words[1:])
        assert (config.disaggregation_mode, config.port, config.host) == (role, 30000, "0.0.0.0")
        assert config.enable_metrics and not config.unknown_flags and not config.ignored_flags
        assert config.drain_timeout < seconds(found[role]["stop_grace_period"])
        assert found[role]["volumes"][0] == "/models/qwen3:/model:ro" and config.model_path == "/model"
    words = found["router"]["command"]
    assert words[0] == "router"
    options = parse_options(words[1:])
    assert options.prefill == (("http://prefill:30000", 8998),) and options.decode == ("http://decode:30000",)
    assert options.shutdown_grace_period_secs < seconds(found["router"]["stop_grace_period"])
    assert load_config(found["prefill"]["command"][1:]).disaggregation_bootstrap_port == 8998
    assert found["router"]["environment"] == found["decode"]["environment"] == {"SGLANG_LITE_API_KEY": ""}


def test_a_gpu_each_and_nothing_open_to_the_network() -> None:
    found = services()
    gpus = [
        found[role]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for role in ("prefill", "decode")
    ]
    assert gpus == [["0"], ["1"]]
    published = [port for service in found.values() for port in service.get("ports", ())]
    assert len(published) == 3 and all(port.startswith("127.0.0.1:") for port in published)
    assert "ports" not in found["prefill"] and "ports" not in found["decode"]


def test_prometheus_scrapes_and_grafana_finds_it() -> None:
    found = services()
    scraped = yaml.safe_load((ROOT / "ops/prometheus/prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in scraped["scrape_configs"]}
    assert targets == {"sglang-server": ["prefill:30000", "decode:30000"], "sglang-router": ["router:30000"]}
    assert all(target.partition(":")[0] in found for group in targets.values() for target in group)
    for service in ("prometheus", "grafana"):
        for volume in found[service]["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (PATH.parent / source).exists(), source
    provisioning = ROOT / "ops/grafana/provisioning"
    source = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    folder = yaml.safe_load((provisioning / "dashboards/sglang-lite.yaml").read_text())["providers"][0]["options"][
        "path"
    ]
    mounted = [volume.split(":")[1] for volume in found["grafana"]["volumes"]]
    assert f"{folder}/sglang-lite.json" in mounted


def seconds(text: str) -> int:
    assert text.endswith("s")
    return int(text[:-1])
