"""Where the members of a fleet are, for the file discovery of Prometheus."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from sglang_lite.fleet.spec import Role

SERVER_JOB, ROUTER_JOB = "sglang-server", "sglang-router"
"""Names that ops/prometheus/rules.yml and the dashboard expect."""


class TargetFile:
    """A file that holds the addresses of router and replicas, replaced whenever they change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = b""

    def update(self, router: str, replicas: Iterable[tuple[str, str, Role]]) -> None:
        """Write it if it has to say something else.

        Args:
            router: its address.
            replicas: address, name of its group and role of each.

        Raises:
            OSError: it cannot be written.
        """
        groups = [_group(router, {"job": ROUTER_JOB})]
        groups += [_group(url, {"job": SERVER_JOB, "group": group, "role": role}) for url, group, role in replicas]
        text = msgspec.json.format(msgspec.json.encode(groups))
        if text == self._written:
            return
        # Prometheus may read at any time: it sees the old file or the new one.
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        beside.write_bytes(text)
        beside.replace(self._path)
        self._written = text


def _group(url: str, labels: dict[str, str]) -> dict[str, object]:
    return {"targets": [urlsplit(url).netloc], "labels": labels}
