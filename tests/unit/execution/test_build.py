"""From a configuration to an executor, on the smoke model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_lite.config import ServerConfig
from sglang_lite.execution.build import EngineLimits, build_executor
from sglang_lite.execution.executor import TorchExecutor
from sglang_lite.models.description import read_description
from sglang_lite.types import StartupError
from tests.support.step_plans import PlanMaker, PlannedSequence


def build(model: Path, **options: Any) -> tuple[TorchExecutor, EngineLimits]:
    config = ServerConfig(model_path=str(model), **{"device": "cpu", "max_total_tokens": 64, **options})
    return build_executor(config, read_description(model))


def test_the_smoke_model_answers_world(smoke_model: Path) -> None:
    executor, limits = build(smoke_model, max_running_requests=3)
    geometry = limits.geometry
    assert (geometry.num_pages, geometry.page_size, limits.max_running_requests) == (4, 16, 3)
    assert (limits.dtype, limits.kv_dtype, limits.context_length) == ("float32", "float32", 32)
    assert limits.weight_bytes > 0 and set(limits.startup_seconds) == {"load", "first_step"}
    maker = PlanMaker(geometry.page_size, geometry.num_pages)
    executor.submit(maker.plan([], [(PlannedSequence(0), [1])]))
    assert executor.collect().tokens.tolist() == [2]
    executor.close()


def test_element_types(smoke_model: Path) -> None:
    executor, limits = build(smoke_model, dtype="bfloat16", kv_cache_dtype="float32")
    executor.close()
    assert (limits.dtype, limits.kv_dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "auto"}, "--device auto: no executable production backend"),
        ({"device": "metal"}, "--device metal: no provider"),
        ({"dtype": "half"}, "--dtype half is not supported"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3 is not supported"),
        ({"page_size": 0}, "--page-size 0"),
        ({"max_total_tokens": 60}, "--max-total-tokens 60 is not a multiple"),
    ],
)
def test_refusals_come_before_weights_are_read(
    smoke_model: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    def unreachable(*arguments: object, **keywords: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("sglang_lite.execution.build_host.load_model", unreachable)
    with pytest.raises(StartupError, match=message):
        build(smoke_model, **options)
