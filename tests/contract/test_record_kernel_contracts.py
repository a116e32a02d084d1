"""The recorder, over stand-ins that have the recorded signatures: what it writes is what they were made of."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from ops import record_kernel_contracts as recorder
from tests.support.kernel_records import DATA
from tests.support.kernel_stubs import installed_stubs, registered_operators

VERSIONS = {"sglang-kernel": "0.4.10", "flashinfer-python": "0.7.2"}


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def without_aliases(entries: dict[str, Any]) -> dict[str, Any]:
    """Which other paths are found depends on the modules that were imported."""
    return {path: {name: part for name, part in entry.items() if name != "also"} for path, entry in entries.items()}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of the newer line and of FlashInfer, written by the command."""

    class Installed:
        metadata = {"Name": "sglang-kernel"}

    monkeypatch.setattr(importlib.metadata, "version", VERSIONS.__getitem__)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [Installed()])
    with installed_stubs(), registered_operators():
        assert recorder.main(["--output", str(tmp_path)]) == 0
    return tmp_path


def test_signatures_are_recorded(written: Path) -> None:
    name = "flashinfer-0.7.2-signatures.json"
    found, expected = read(written / name), read(DATA / name)
    assert (found["package"], found["version"]) == ("flashinfer-python", "0.7.2")
    for kind in ("functions", "classes"):
        assert without_aliases(found[kind]) == without_aliases(expected[kind])
    assert "flashinfer.rmsnorm" in found["functions"]["flashinfer.norm.rmsnorm"]["also"]


def test_functions_and_operators_of_the_kernel_wheel_are_recorded(written: Path) -> None:
    name = "sgl_kernel-0.4.10-signatures.json"
    found, expected = read(written / name), read(DATA / name)
    assert found["functions"] == expected["functions"]
    name = "sgl_kernel-0.4.10-schemas.json"
    schemas, recorded = read(written / name)["ops"], read(DATA / name)["ops"]
    assert {key: op["schema"] for key, op in schemas.items()} == {key: op["schema"] for key, op in recorded.items()}
    assert {key: op["mutates"] for key, op in schemas.items()} == {key: op["mutates"] for key, op in recorded.items()}


def test_an_environment_without_a_line_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", list)
    with pytest.raises(SystemExit):
        recorder.main(["--output", str(tmp_path)])
