"""Dashboard, rules and the metrics there are: a prefill and a decode server behind a router, and a real Prometheus.

Every query of the dashboard is run, every selector of the rules is looked up.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.support.fleets import FleetProcess, wait_gone
from tests.support.prometheus import Prometheus, promtool
from tests.support.server import ROOT

DASHBOARD = json.loads((ROOT / "ops/grafana/sglang-lite.json").read_text())
RULES = ROOT / "ops/prometheus/rules.yml"
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SELECTOR = re.compile(r"(?<![\w:])((?:sglang[:_]|smg_|sgl_router_)\w+|up)(?:\{([^}]*)\})?")
FAILURE = {"text": "A", "bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7}


pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def prometheus(chain_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    promtool()  # rather than after servers were started in vain
    directory = tmp_path_factory.mktemp("dashboard")
    flags = ["--model-path", str(chain_model), "--device", "cpu", "--max-total-tokens", "4096", "--enable-metrics"]
    with FleetProcess(
        ["--prefill", "1", "--decode", "1"], [*flags, "--disaggregation-transfer-backend", "tcp"], directory
    ) as fleet:
        fleet.wait_ready()
        workers = fleet.workers()
        targets = {
            "sglang-server": [url.removeprefix("http://") for url in workers],
            "sglang-router": [fleet.url.removeprefix("http://")],
        }
        use(fleet, workers)
        with Prometheus(targets, RULES, directory) as started:
            started.wait_scraped(2)
            use(fleet, workers)
            started.wait_scraped(3)
            yield started
        everything = psutil.Process(fleet.process.pid).children(recursive=True)
        assert fleet.stop() == 0, fleet.output
        wait_gone(everything)


def use(fleet: FleetProcess, workers: dict[str, dict[str, Any]]) -> None:
    """Requests of the kinds that the dashboard tells apart: whole, streamed, and one whose transfer fails."""
    assert fleet.generate(tokens=8) == "BCDABCDA"
    body = json.dumps({"text": "ABCD", "stream": True, "sampling_params": {"max_new_tokens": 8, "temperature": 0}})
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(fleet.url + "/generate", body.encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.read().rstrip().endswith(b"[DONE]")
    decode = next(url for url, worker in workers.items() if worker["worker_type"] == "decode")
    request = urllib.request.Request(decode + "/generate", json.dumps(FAILURE).encode(), headers)
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=30)


def filled(expression: str) -> str:
    """With Grafana's variables at their defaults."""
    text = re.sub(r"\$(model|instance|router)\b", ".*", expression).replace("$__rate_interval", "1m")
    assert "$" not in text, text
    return text


def targets() -> list[Any]:
    return [
        pytest.param(target["expr"], target["legendFormat"], id=f"{panel['title']} {target['refId']}")
        for panel in PANELS
        for target in panel["targets"]
    ]


@pytest.mark.parametrize(("expression", "legend"), targets())
def test_panels(prometheus: Prometheus, expression: str, legend: str) -> None:
    """The query gives series, with the labels that it groups by and that the legend shows."""
    found = prometheus.query(filled(expression))
    assert found, expression
    labels = set.union(*(set(series["metric"]) for series in found))
    grouped = {name.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for name in group.split(",")} - {
        "le"
    }
    assert grouped and grouped <= labels, (grouped, labels)
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert shown and shown <= labels, (shown, labels)
    for name, label in selectors(expression):
        assert prometheus.get("series", **{"match[]": f'{name}{{{label}!=""}}'}), (name, label)


def grouping(expression: str) -> set[str]:
    """Labels that ``expression`` groups by."""
    return {name.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for name in group.split(",")}


def selectors(expression: str) -> list[tuple[str, str]]:
    """(metric, label) of every label that a selector of ``expression`` names."""
    return [
        (name, label)
        for name, inside in SELECTOR.findall(expression)
        for label in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', inside)
    ]


def test_rules_name_what_there_is(prometheus: Prometheus) -> None:
    """Metrics of rules exist, with the labels that they select and group by; nothing is alarmed but what happened."""
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert len(rules) > 15
    recorded = {rule["record"] for rule in rules if "record" in rule}
    for rule in rules:
        names = {name for name, _ in SELECTOR.findall(rule["expr"])} - recorded
        used = set(re.findall(r"(?:model|instance):[\w:]+", rule["expr"]))
        assert used <= recorded
        assert names or used, rule
        for name in names:
            assert prometheus.get("series", **{"match[]": name}), (name, rule)
        for name, label in selectors(rule["expr"]):
            assert prometheus.get("series", **{"match[]": f'{name}{{{label}!=""}}'}), (name, label)
        for name in names:
            series = prometheus.get("series", **{"match[]": name})
            assert grouping(rule["expr"]) <= set.union(*(set(one) for one in series)), rule
    deadline = time.monotonic() + 20
    while not all(prometheus.query(name) for name in recorded):
        assert time.monotonic() < deadline, [name for name in recorded if not prometheus.query(name)]
        time.sleep(0.2)
    groups = prometheus.get("rules")["groups"]
    states = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(states) == recorded | {rule["alert"] for rule in rules if "alert" in rule}
    assert {rule["health"] for rule in states.values()} == {"ok"}
    assert not [name for name, rule in states.items() if rule.get("state") == "firing"]


def test_the_dashboard_is_well_formed() -> None:
    """Ids and places are unique, rows hold panels, every variable has a query that is one of ours."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) >= 30
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells and place["x"] + place["w"] <= 24, panel["title"]
        cells |= own
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {
        "datasource",
        "model",
        "instance",
        "router",
    }


def test_variables_find_values(prometheus: Prometheus) -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variable["definition"])
            assert match is not None
            values = prometheus.get(f"label/{match[2]}/values", **{"match[]": match[1]})
            assert len(values) == (2 if variable["name"] == "instance" else 1), variable
