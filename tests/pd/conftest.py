"""What the tests of pairs share: a checkpoint, and one engine that says what is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.disaggregated_pair import Oracle, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def oracle(model: Path) -> Iterator[Oracle]:
    with Oracle.of(model) as oracle:
        yield oracle
