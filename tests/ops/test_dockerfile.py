"""The Dockerfile: linted by hadolint; what it installs is what the parts need."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.support.server import ROOT

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
INSTRUCTIONS = [
    re.sub(r"\\\n", " ", part) for part in re.findall(r"(?m)^[A-Z]+ (?:.*\\\n)*.*$", re.sub(r"(?m)^#.*\n", "", TEXT))
]


def values(name: str) -> list[str]:
    return [part.removeprefix(f"{name} ") for part in INSTRUCTIONS if part.startswith(f"{name} ")]


def test_hadolint() -> None:
    """DL3008 wants versions of Debian's packages, which an exchangeable base cannot have."""
    program = Path(sys.executable).with_name("hadolint")
    words = [str(program), "--ignore", "DL3008", str(ROOT / "Dockerfile")]
    run = subprocess.run(words, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_base_and_extras_are_arguments() -> None:
    assert values("FROM") == ["${BASE} AS build", "${BASE}"]
    arguments = dict(value.partition("=")[::2] for value in values("ARG"))
    assert set(arguments) == {"BASE", "PIP_EXTRA_INDEX_URL", "EXTRAS"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"EXTRAS=([\w,]+)", TEXT + (ROOT / "ops/compose.yaml").read_text())
    named += re.findall(r"EXTRAS:-([\w,]+)", (ROOT / "ops/compose.yaml").read_text())
    assert len(named) >= 4
    assert {extra for group in named for extra in group.split(",")} <= set(extras)


def test_libraries_of_the_transports() -> None:
    """What .ci/run installs for Mooncake, the production image has as well, and the pages name it."""
    wanted = re.search(r"for package in ([^;]+);", (ROOT / ".ci/run").read_text())
    assert wanted is not None
    libraries = {name for name in wanted[1].split() if name.startswith("lib")}
    assert libraries >= {"libibverbs1", "libnuma1", "libcurl4"}
    last = TEXT.rpartition("FROM ")[2]
    assert libraries <= set(re.findall(r"[\w.-]+", last))
    for page in ("README.md", "docs/disaggregation.md", "docs/transfer.md"):
        assert libraries <= set(re.findall(r"[\w.-]+", (ROOT / page).read_text())), page


def test_runs_as_nobody_special_and_in_exec_form() -> None:
    assert values("USER") == ["10001:10001"]
    assert json.loads(values("ENTRYPOINT")[0]) == ["tini", "--", "sglang-lite"]
    assert json.loads(values("CMD")[-1]) == ["serve"]
    check = values("HEALTHCHECK")[0]
    words = json.loads(check.partition("CMD ")[2])
    assert words[:2] == ["python3", "-c"] and "/health" in words[2]
    compile(words[2], "healthcheck", "exec")
    assert values("EXPOSE") == ["30000"]
    chart = (ROOT / "ops/helm/sglang-lite/values.yaml").read_text()
    assert "runAsUser: 10001" in chart and "fsGroup: 10001" in chart


def test_what_is_copied_is_in_the_context() -> None:
    """.dockerignore lets in what COPY takes, and no more."""
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        word.removeprefix("./")
        for value in values("COPY")
        if not value.startswith("--from")
        for word in value.split()[:-1]
    }
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)
