"""A real Prometheus that scrapes servers of a test (Debian's package ``prometheus``)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from tests.support.server import free_port


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        assert not os.environ.get("CI"), f"{name} is not there: .ci/run must install Debian's package prometheus"
        pytest.skip(f"{name} is not installed: apt-get install prometheus")
    return found


def promtool() -> str:
    """Where promtool is; skips the test where it is not."""
    return _program("promtool")


class Prometheus:
    """Scrapes ``targets`` (job -> addresses) every 0.5 s, with the rules of ``rules``."""

    def __init__(self, targets: dict[str, list[str]], rules: Path, directory: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        configuration = directory / "prometheus.yml"
        document = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": addresses}]} for job, addresses in targets.items()
            ],
        }
        configuration.write_text(yaml.safe_dump(document))
        self._log = directory / "prometheus.log"
        words = [
            _program("prometheus"),
            f"--config.file={configuration}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)

    def get(self, path: str, **parameters: str) -> Any:
        """``data`` of an answer of its API."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.loads(response.read())["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that ``expression`` gives now."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def wait_scraped(self, times: int, seconds: float = 30.0) -> None:
        """Until each target has been scraped ``times`` times since the call."""
        begun, deadline = time.time(), time.monotonic() + seconds
        while True:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            window = max(1, int(time.time() - begun))
            try:
                counts = self.query(f"count_over_time(up[{window}s])")
            except OSError:  # it starts
                counts = []
            if counts and all(float(item["value"][1]) >= times for item in counts):
                return
            time.sleep(0.2)
