"""Acceptance of a CUDA machine: ``pytest tests/gpu -m gpu``. Elsewhere every test says why it did not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_lite.acceptance import why_not_run

HERE = Path(__file__).parent


def _is_here(item: pytest.Item) -> bool:
    return HERE in item.path.parents


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """After deselection: nothing is asked of the machine when no test of this folder is to run."""
    chosen = [item for item in items if _is_here(item)]
    reason = why_not_run() if chosen else None
    if reason is not None:
        for item in chosen:
            item.add_marker(pytest.mark.skip(reason=f"no GPU acceptance on this machine: {reason}"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run of nothing but this folder that skipped everything is no success."""
    items = session.items
    skipped = [item for item in items if item.get_closest_marker("skip")]
    if items and all(_is_here(item) for item in items) and len(skipped) == len(items) and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
