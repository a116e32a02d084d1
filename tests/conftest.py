"""Fixtures shared by all tests: model directories and the recorded outputs of the demo model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

# Tests run side by side; one thread each is fastest, and it must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def smoke_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """F1: answers ``world`` to ``hi``."""
    from tests.support.smoke_model import build_smoke_model

    return build_smoke_model(tmp_path_factory.mktemp("smoke-model"))


@pytest.fixture(scope="session")
def chain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """F2: the next token is a fixed function of the last one."""
    from tests.support.chain_model import build_chain_model

    return build_chain_model(tmp_path_factory.mktemp("chain-model"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """F4: SmolLM2-135M-Instruct in the user's cache, made once and shared by all test processes."""
    from sglang_lite.demo_model import materialize_in_cache

    return materialize_in_cache(lambda done, total: None)


@pytest.fixture(scope="session")
def demo_goldens() -> list[dict[str, Any]]:
    """Recorded greedy outputs of the demo model in float32."""
    document = json.loads((DATA / "smollm2-greedy.json").read_text(encoding="utf-8"))
    cases: list[dict[str, Any]] = document["cases"]
    return cases
