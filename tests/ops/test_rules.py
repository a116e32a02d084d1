"""``ops/prometheus``: checked and tested by promtool."""

from __future__ import annotations

import subprocess

import pytest

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
