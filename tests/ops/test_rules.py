"""``ops/prometheus``: checked and tested by promtool."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from tests.support.prometheus import promtool
from tests.support.server import ROOT

FOLDER = ROOT / "ops/prometheus"


@pytest.mark.parametrize("words", [["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"]])
def test_rules(words: list[str]) -> None:
    run = subprocess.run([promtool(), *words], cwd=FOLDER, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "SUCCESS" in run.stdout + run.stderr


def test_configuration() -> None:
    run = subprocess.run([promtool(), "check", "config", "prometheus.yml"], cwd=FOLDER, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 rule files found" in run.stdout + run.stderr


def test_every_alert_is_explained() -> None:
    """docs/fleet.md says what to do about each, and names none that does not exist."""
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    table = (ROOT / "docs/fleet.md").read_text().partition("| alert | what to do |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(SGLang\w+)`", table)) == alerts
