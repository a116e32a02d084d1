"""What may import what, and what an import brings in."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SERVING = ("aiohttp", "grpc", "zmq", "transformers")
GPU = ("sgl_kernel", "flashinfer", "mooncake", "nixl")


def loaded_after(statement: str, modules: tuple[str, ...]) -> set[str]:
    """Which of ``modules`` a fresh interpreter has loaded after ``statement``."""
    script = f"import sys\n{statement}\nprint(','.join(name for name in {modules!r} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.strip().split(",")) - {""}


def test_layers() -> None:
    # The linter's cache remembers imports of modules that did not exist yet as absent, so it is not used.
    script = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_package_is_light() -> None:
    assert loaded_after("import sglang_lite", ("torch", "numpy", "pydantic", *SERVING, *GPU)) == set()


def test_package_imports_fast() -> None:
    script = "import time; start = time.perf_counter(); import sglang_lite; print(time.perf_counter() - start)"
    seconds = [
        float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT).stdout)
        for _ in range(5)
    ]
    assert statistics.median(seconds) < 0.3


def test_public_names_are_found_lazily() -> None:
    assert loaded_after("from sglang_lite import ServerConfig, SamplingParams", ("torch", *SERVING)) == set()
    assert loaded_after("from sglang_lite import AsyncEngine", ("torch", "aiohttp", *GPU)) == set()
    assert loaded_after("from sglang_lite import Engine", ("aiohttp", *GPU)) == set()
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([sys.executable, "-c", "from sglang_lite import Missing"], check=True, capture_output=True)


@pytest.mark.parametrize("package", ["scheduler", "cache"])
def test_core_is_free_of_torch_and_event_loops(package: str) -> None:
    statement = (
        "import importlib, pkgutil\n"
        f"import sglang_lite.{package} as package\n"
        "for info in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(info.name)"
    )
    assert loaded_after(statement, ("torch", "asyncio", "socket", "selectors", *SERVING, *GPU)) == set()


@pytest.mark.parametrize("module", ["sglang_lite.server.run", "sglang_lite.frontend", "sglang_lite.engine.client"])
def test_front_process_never_loads_torch(module: str) -> None:
    assert loaded_after(f"import {module}", ("torch", "transformers", *GPU)) == set()


def test_core_process_loads_no_gpu_wheel_and_no_web_server() -> None:
    assert loaded_after("import sglang_lite.engine.process", ("aiohttp", "grpc", "transformers", *GPU)) == set()
