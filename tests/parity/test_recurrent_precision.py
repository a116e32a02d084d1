"""Half precision of models with recurrent layers: rounding costs about what it costs in transformers."""

from __future__ import annotations

import copy

import pytest
import torch

from sglang_lite.models.registry import load_model
from tests.support.model_library import Library, full_pass
from tests.support.paged_runner import PagedRunner


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next", "kimi_linear"])
def test_bfloat16_is_as_near_to_float32_as_in_transformers(library: Library, case: str) -> None:
    """The bound is relative: in these tiny models a norm over small outputs enlarges whatever was rounded before it."""
    example, ops = library.example(case), library.operations["cpu"]
    model, _ = load_model(example.directory, ops=ops, dtype=torch.bfloat16)
    runner = PagedRunner(model, ops, page_size=16, dtype=torch.bfloat16)
    [logits] = runner.step([(runner.new_sequence(), example.token_ids)])
    assert logits.dtype == torch.float32
    theirs = full_pass(copy.deepcopy(example.oracle).to(torch.bfloat16), example.token_ids).float()
    errors = [(given - example.logits).abs().mean(-1).median().item() for given in (logits, theirs)]
    assert 0 < errors[0] < 1.5 * errors[1] < 0.4
