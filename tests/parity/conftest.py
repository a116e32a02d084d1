"""Tiny checkpoints, built once a run, and the operations under test."""

from __future__ import annotations

import pytest

from tests.support.model_library import Library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("tiny"))
