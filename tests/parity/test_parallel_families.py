"""Every family split over several ranks computes what transformers computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.models.registry import load_model
from tests.support.model_library import Library
from tests.support.paged_runner import PagedRunner
from tests.support.thread_group import ThreadGroup, run_ranks
from tests.support.tiny_checkpoints import CASES

SPLITS = [
    ("llama_biases", 2, 1),
    ("llama_biases", 4, 1),
    ("qwen2_window", 2, 1),
    ("qwen3", 4, 1),
    ("qwen3_moe", 2, 1),
    ("qwen3_moe", 2, 2),
    ("qwen3_moe", 4, 2),
    ("qwen3_moe_some_dense", 4, 4),
    ("glm4_moe", 2, 2),
    ("glm4_moe", 2, 1),
    ("gpt_oss", 2, 1),
    ("gpt_oss", 4, 2),
    ("gemma3", 2, 1),
    ("deepseek_v2", 2, 1),
    ("deepseek_v3", 2, 2),
    ("deepseek_v3_yarn", 4, 1),
    ("deepseek_v32", 2, 1),
    ("kimi_k25", 2, 1),
    ("glm4_moe_lite", 2, 2),
    ("kimi_k2", 2, 2),
    ("deepseek_v32", 2, 1),
    ("glm_moe_dsa_shared_choice", 2, 2),
    ("qwen3_next", 2, 1),
    ("qwen3_5", 2, 1),
    ("qwen3_5_moe", 2, 2),
    ("kimi_linear", 2, 1),
    ("kimi_linear", 4, 2),
]


@pytest.mark.parametrize(("case", "size", "expert_parts"), SPLITS)
def test_the_ranks_together_compute_the_model(library: Library, case: str, size: int, expert_parts: int) -> None:
    example = library.example(case)

    def compute(group: ThreadGroup) -> Tensor:
        ops = CpuOperations(measure=False)
        model, _ = load_model(example.directory, ops=ops, parallel=group, progress=False)
        runner = PagedRunner(model, ops, page_size=4)
        sequence = runner.new_sequence()
        steps = [runner.step([(sequence, example.token_ids[:30])])[0]]
        steps += [runner.step([(sequence, [token])])[0] for token in example.token_ids[30:36]]
        return torch.cat(steps)

    results = run_ranks(size, compute, expert_parts=expert_parts)
    for logits in results:
        assert (logits - example.logits[:36]).abs().max() <= CASES[case].tolerance
        assert torch.equal(logits, results[0]), "the ranks must agree to the last bit"
