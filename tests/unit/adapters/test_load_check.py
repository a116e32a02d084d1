"""Loading the wheels in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_lite.adapters.cuda import load_check


def package(directory: Path, name: str, code: str) -> None:
    (directory / name).mkdir()
    (directory / name / "__init__.py").write_text(code, encoding="utf-8")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of packages that the other process finds first; torch is a small one, so that it loads at once."""
    package(
        tmp_path,
        "torch",
        "__version__ = '2.14.1+cu130'\n"
        "class version: cuda = '13.0'\n"
        "class cuda:\n    @staticmethod\n    def is_available(): return True\n",
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")
    return tmp_path


def test_everything_loads(wheels: Path) -> None:
    package(wheels, "flashinfer", "print('talks while it loads')")
    package(wheels, "sgl_kernel", "")
    (wheels / "sgl_kernel" / "flash_attn.py").touch()
    assert load_check.check() == load_check.LoadReport("2.14.1+cu130", "13.0", True, {})


def test_messages_of_failed_imports(wheels: Path) -> None:
    package(wheels, "flashinfer", "raise RuntimeError('no cache directory')")
    package(wheels, "sgl_kernel", "raise ImportError('libnvrtc.so.13: cannot open shared object file')")
    report = load_check.check()
    assert report.crash is None
    assert report.errors == {
        "flashinfer": "RuntimeError: no cache directory",
        "sgl_kernel": "ImportError: libnvrtc.so.13: cannot open shared object file",
    }


def test_a_process_that_dies(wheels: Path) -> None:
    package(wheels, "flashinfer", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    package(wheels, "sgl_kernel", "")
    report = load_check.check()
    assert report.crash is not None
    assert "ended with code -11" in report.crash


def test_a_process_that_hangs(wheels: Path) -> None:
    package(wheels, "flashinfer", "import threading\nthreading.Event().wait()")
    report = load_check.check(timeout_seconds=1.0)
    assert report.crash == "loading took more than 1 s"
