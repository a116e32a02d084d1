"""Sparse attention limits the context on devices that cannot choose keys, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_lite.config import ServerConfig
from sglang_lite.execution.context_length import served_context_length
from sglang_lite.models.description import describe
from sglang_lite.types import StartupError
from tests.unit.models.test_deepseek_config import V3, V32


def served(model: dict[str, Any], *, selects_keys: bool, context_length: int | None = None) -> int:
    config = ServerConfig(model_path="x", device="cuda", context_length=context_length)
    return served_context_length(config, describe(model), selects_keys=selects_keys)


def test_a_device_that_chooses_keys_serves_every_length() -> None:
    assert served(V32, selects_keys=True) == 163840
    assert served(V32, selects_keys=True, context_length=4096) == 4096


def test_a_device_that_does_not_serves_what_needs_no_choice() -> None:
    assert served(V32, selects_keys=False) == 2048
    assert served(V32, selects_keys=False, context_length=1000) == 1000
    with pytest.raises(StartupError, match=r"--context-length 2049.*up to 2048 tokens \(index_topk\)"):
        served(V32, selects_keys=False, context_length=2049)


def test_models_without_a_choice_are_not_limited() -> None:
    assert served(V3, selects_keys=False) == 163840
