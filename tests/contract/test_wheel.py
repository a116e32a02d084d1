"""The built distributions: pure Python, one top-level package, the linked folders inside it, nothing missing."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import sglang_lite

ROOT = Path(__file__).parents[2]


_KINDS = (".py", ".pyi", ".typed", ".html", ".css", ".js")


def source_files() -> set[str]:
    """Every file of the package as it must be installed, links followed: modules, and the page of the server."""
    found = set()
    for folder, folders, files in os.walk(ROOT / "sglang_lite", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found |= {str((Path(folder) / name).relative_to(ROOT)) for name in files if name.endswith(_KINDS)}
    return found


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel); the wheel is built out of the sdist, as an index would."""
    output = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (sdist,) = output.glob("*.tar.gz")
    (wheel,) = output.glob("*.whl")
    return sdist, wheel


def test_links_are_relative_and_committed() -> None:
    for name in ("adapters", "transfer"):
        assert os.readlink(ROOT / "sglang_lite" / name) == f"../{name}"


def test_wheel_is_pure_python(distributions: tuple[Path, Path]) -> None:
    _, wheel = distributions
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        information = archive.read(next(name for name in names if name.endswith(".dist-info/WHEEL"))).decode()
    assert "Root-Is-Purelib: true" in information
    assert [name for name in names if name.endswith((".so", ".pyd", ".cu", ".c", ".cpp"))] == []


def test_wheel_holds_the_whole_package_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    _, wheel = distributions
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    top_level = {name.split("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"sglang_lite"}
    assert "sglang_lite/adapters/base.py" in names
    assert "sglang_lite/transfer/__init__.py" in names
    assert {name for name in names if name.startswith("sglang_lite/")} == source_files()


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {str(Path(name).parent) for name in source_files() if name.endswith(".py")}
    assert [folder for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()] == []


def test_sdist_holds_the_same_modules(distributions: tuple[Path, Path]) -> None:
    sdist, _ = distributions
    with tarfile.open(sdist) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    assert source_files() <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


def test_metadata(distributions: tuple[Path, Path]) -> None:
    _, wheel = distributions
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        entry_points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert (metadata["Name"], metadata["Version"]) == ("sglang-lite", sglang_lite.__version__)
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "sglang-lite = sglang_lite.cli:main" in entry_points
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in required if line.startswith(("sglang-kernel", "flashinfer", "mooncake", "nixl"))]
    extras = " ".join(line for line in metadata.get_all("Requires-Dist") if "extra == 'cuda'" in line.replace('"', "'"))
    assert "sglang-kernel==0.4.10" in extras
    assert "flashinfer-python==0.7.2" in extras


def test_the_chart_runs_this_version() -> None:
    chart = (ROOT / "ops" / "helm" / "sglang-lite" / "Chart.yaml").read_text(encoding="utf-8")
    assert f'appVersion: "{sglang_lite.__version__}"' in chart.splitlines()


def test_checkout_is_complete() -> None:
    for name in ("pyproject.toml", "sglang_lite", "adapters", "transfer", "tests", "ops", "Dockerfile", "LICENSE"):
        assert (ROOT / name).exists(), name
