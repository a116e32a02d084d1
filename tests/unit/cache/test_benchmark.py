"""The prefix-cache benchmark runs and writes what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import prefix_cache


def test_prefix_cache_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "numbers.json"
    sizes = ["--page-sizes", "16", "--cached", "12", "--tokens", "4096", "8192", "--repeat", "4"]
    monkeypatch.setattr("sys.argv", ["prefix_cache", *sizes, "--json", str(path)])
    prefix_cache.main()
    numbers = json.loads(path.read_text())
    assert numbers["machine"]["python"] in capsys.readouterr().out
    operations = {row["operation"] for row in numbers["rows"] if row["tokens"] == 8192}
    assert operations == {
        "match hit",
        "match hit, cold",
        "match_length",
        "match miss",
        "match half",
        "insert new",
        "insert again",
        "lock + unlock",
        "evict",
    }
    assert all(row["median us"] > 0 for row in numbers["rows"])
