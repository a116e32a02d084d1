"""What FlashInfer needs to compile, on machines that have more or less of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_lite.adapters.compilers import Machine, missing_compilers

TOOLS = {"nvcc": "/opt/cuda/bin/nvcc", "c++": "/usr/bin/c++", "ninja": "/usr/bin/ninja"}


def machine(
    tools: dict[str, str], environment: dict[str, str] | None = None, packages: dict[str, str] | None = None
) -> Machine:
    return Machine(
        environment or {},
        which=tools.get,
        is_file=lambda path: path == Path("/opt/cuda/bin/nvcc"),
        version_of=(packages or {}).get,
    )


def test_everything_is_there() -> None:
    assert missing_compilers(machine(TOOLS)) == ()
    without_path = {name: path for name, path in TOOLS.items() if name != "nvcc"}
    assert missing_compilers(machine(without_path, {"CUDA_HOME": "/opt/cuda"})) == ()


@pytest.mark.parametrize(
    ("tool", "expected"),
    [("nvcc", "/usr/local/cuda/bin/nvcc"), ("c++", "apt-get install g++"), ("ninja", "pip install ninja")],
)
def test_what_is_missing(tool: str, expected: str) -> None:
    (problem,) = missing_compilers(machine({name: path for name, path in TOOLS.items() if name != tool}))
    assert expected in problem
    assert "flashinfer-jit-cache" in problem


def test_a_wrong_cuda_home_hides_the_one_on_the_path() -> None:
    (problem,) = missing_compilers(machine(TOOLS, {"CUDA_HOME": "/nowhere"}))
    assert "/nowhere/bin/nvcc" in problem


def test_another_compiler() -> None:
    (problem,) = missing_compilers(machine(TOOLS, {"CXX": "clang++"}))
    assert "clang++" in problem


def test_compiled_kernels_need_no_compiler() -> None:
    assert missing_compilers(machine({}, packages={"flashinfer-jit-cache": "0.7.2"})) == ()
    assert len(missing_compilers(machine({}))) == 3
