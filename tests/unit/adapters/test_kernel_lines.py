"""Which kernel wheels are installed, from package metadata."""

from __future__ import annotations

import re

import pytest

from sglang_lite.adapters.kernel_lines import CUDA12, CUDA13, installed_kernels

NEW = {"sglang-kernel": "0.4.10", "flashinfer-python": "0.7.2", "torch": "2.14.1+cu130"}
OLD = {"sgl-kernel": "0.3.21", "flashinfer-python": "0.7.2", "torch": "2.9.1+cu128"}


def test_both_lines_are_told_apart() -> None:
    for versions, line in ((NEW, CUDA13), (OLD, CUDA12)):
        found = installed_kernels(versions.get)
        assert found.line is line
        assert found.has_flashinfer
        assert found.problems == ()
        assert found.versions == versions


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sglang-kernel": None}, r"no kernel wheel.*sglang-lite\[cuda\].*sglang-lite\[cuda12\]"),
        ({"sglang-kernel": "0.4.6"}, r"sglang-kernel 0\.4\.6 is installed.*0\.4\.10.*sglang-lite\[cuda\]"),
        ({"sgl-kernel": "0.3.21"}, "both installed.*pip uninstall sglang-kernel sgl-kernel"),
        ({"torch": "2.13.0+cpu"}, r"built for torch 2\.14\.1, installed is 2\.13\.0\+cpu.*pip install torch==2\.14\.1"),
        ({"torch": None}, "installed is none"),
        ({"flashinfer-python": None}, "flashinfer-python is not installed"),
        ({"flashinfer-python": "0.7.4"}, r"flashinfer-python 0\.7\.4.*pip install flashinfer-python==0\.7\.2"),
    ],
)
def test_what_does_not_fit_is_named_with_a_remedy(change: dict[str, str | None], problem: str) -> None:
    found = installed_kernels({**NEW, **change}.get)
    assert len(found.problems) == 1
    assert re.search(problem, found.problems[0]), found.problems[0]


def test_a_line_of_another_version_serves_nothing() -> None:
    assert installed_kernels({**NEW, "sglang-kernel": "0.4.6"}.get).line is None
    assert not installed_kernels({**NEW, "flashinfer-python": "0.7.4"}.get).has_flashinfer
    assert installed_kernels({**NEW, **OLD}.get).line is None
