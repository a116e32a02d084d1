"""Every family equals transformers: in one pass, step by step over pages, and with shared prefixes.

A row of ``CASES`` is all that a further family needs.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import Operations
from sglang_lite.models.registry import load_model
from sglang_lite.types import StartupError
from tests.support.model_library import Library, full_pass
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_checkpoints import CASES, TinyCase, save_checkpoint

each_case = pytest.mark.parametrize("case", list(CASES))
each_operations = pytest.mark.parametrize("operations", ["reference", "cpu"])
each_page_size = pytest.mark.parametrize("page_size", [1, 4, 16])


def assert_same_logits(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() <= tolerance
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@each_operations
@each_case
def test_one_pass_equals_transformers(library: Library, case: str, operations: str) -> None:
    example = library.example(case)
    runner = PagedRunner(library.model(case, operations), library.operations[operations], page_size=16)
    [logits] = runner.step([(runner.new_sequence(), example.token_ids)])
    assert_same_logits(logits, example.logits, CASES[case].tolerance)


@each_page_size
@each_operations
@each_case
def test_chunks_and_decode_equal_one_pass(library: Library, case: str, operations: str, page_size: int) -> None:
    example = library.example(case)
    runner = PagedRunner(library.model(case, operations), library.operations[operations], page_size)
    sequence = runner.new_sequence()
    bounds = [0, 5, 14, 16, *range(17, len(example.token_ids) + 1)]
    pieces = [runner.step([(sequence, example.token_ids[start:stop])])[0] for start, stop in itertools.pairwise(bounds)]
    assert_same_logits(torch.cat(pieces), example.logits, CASES[case].tolerance)


@each_page_size
@each_operations
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if not case.recurrent])
def test_shared_prefix_pages_equal_one_pass(library: Library, case: str, operations: str, page_size: int) -> None:
    """A second sequence starts on pages of the first while the first goes on, and neither disturbs the other."""
    example = library.example(case)
    runner = PagedRunner(library.model(case, operations), library.operations[operations], page_size)
    first = runner.new_sequence()
    first_logits = runner.step([(first, example.token_ids[:37])])

    second = runner.fork(first, num_tokens=34)
    shared = second.num_tokens
    assert 0 < shared < 37
    second_ids = example.token_ids[:shared] + example.token_ids[shared:][::-1]
    pages_before = runner.pool[second.pages].clone()
    second_logits = []
    bounds = [shared, shared + 3, *range(shared + 4, len(second_ids) + 1)]
    for step, (start, stop) in enumerate(itertools.pairwise(bounds)):
        work = [(second, second_ids[start:stop])]
        if 37 + step < len(example.token_ids):
            work.append((first, example.token_ids[37 + step : 38 + step]))
        outputs = runner.step(work)
        second_logits.append(outputs[0])
        first_logits += outputs[1:]

    assert_same_logits(torch.cat(second_logits), full_pass(example.oracle, second_ids)[shared:], CASES[case].tolerance)
    assert_same_logits(
        torch.cat(first_logits), example.logits[: sum(len(piece) for piece in first_logits)], CASES[case].tolerance
    )
    assert torch.equal(runner.pool[second.pages[: shared // page_size]], pages_before)


@each_operations
@pytest.mark.parametrize(
    "case", ["llama", "mistral", "qwen2_window", "qwen3_moe", "gpt_oss", "deepseek_v3_yarn", "deepseek_v32"]
)
def test_rows_of_a_mixed_step_do_not_mix(library: Library, case: str, operations: str) -> None:
    """Decode rows of different lengths and prefill chunks in one step give what each gives alone."""
    example = library.example(case)
    runner = PagedRunner(library.model(case, operations), library.operations[operations], page_size=4)
    lengths = [3, 9, 16, 25]
    prompts = [example.token_ids[shift : shift + length] for shift, length in enumerate(lengths)]
    decoding = [runner.new_sequence() for _ in prompts]
    runner.step([(sequence, prompt[:-1]) for sequence, prompt in zip(decoding, prompts, strict=True)])
    fresh = runner.new_sequence()
    work = [(sequence, prompt[-1:]) for sequence, prompt in zip(decoding, prompts, strict=True)]
    outputs = runner.step([*work[:2], (fresh, example.token_ids[:11]), *work[2:]])
    for prompt, output in zip(prompts, [*outputs[:2], *outputs[3:]], strict=True):
        assert_same_logits(output, full_pass(example.oracle, prompt)[-1:], CASES[case].tolerance)
    assert_same_logits(outputs[2], example.logits[:11], CASES[case].tolerance)


@each_operations
@pytest.mark.parametrize("case", ["smollm2", "mistral", "qwen2", "qwen3"])
def test_bfloat16_is_near_float32(library: Library, case: str, operations: str) -> None:
    example, ops = library.example(case), library.operations[operations]
    model, _ = load_model(example.directory, ops=ops, dtype=torch.bfloat16)
    runner = PagedRunner(model, ops, page_size=16, dtype=torch.bfloat16)
    [logits] = runner.step([(runner.new_sequence(), example.token_ids)])
    assert logits.dtype == torch.float32
    error = (logits - example.logits).abs()
    assert 0 < error.mean().item() < 0.05  # logits have a standard deviation of about 1.6
    assert error.max().item() < 0.5


def test_sharded_checkpoint_loads_and_a_missing_shard_is_named(tmp_path: Path, library: Library) -> None:
    case = TinyCase("Qwen3", {"head_dim": 16})
    oracle = save_checkpoint(case, tmp_path, max_shard_size="40KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    ops: Operations = library.operations["reference"]
    model, _ = load_model(tmp_path, ops=ops)
    runner = PagedRunner(model, ops, page_size=4)
    token_ids = list(range(3, 23))
    [logits] = runner.step([(runner.new_sequence(), token_ids)])
    assert_same_logits(logits, full_pass(oracle, token_ids))

    shards[1].unlink()
    with pytest.raises(StartupError, match=f"missing checkpoint shard .*{shards[1].name}"):
        load_model(tmp_path, ops=ops)


def test_untied_model_without_output_matrix_is_refused(tmp_path: Path, library: Library) -> None:
    save_checkpoint(CASES["smollm2"], tmp_path)
    with pytest.raises(StartupError, match=r"missing checkpoint tensor lm_head\.weight"):
        load_model(tmp_path, ops=library.operations["reference"], overrides={"tie_word_embeddings": False})


def test_positions_past_the_models_context_can_be_prepared(library: Library) -> None:
    """A longer context on request: the rotary table covers it."""
    example, ops = library.example("llama"), library.operations["reference"]
    model, description = load_model(example.directory, ops=ops, context_length=300)
    runner = PagedRunner(model, ops, page_size=16)
    token_ids = (example.token_ids * 7)[:300]
    assert description.context_length < len(token_ids)
    [logits] = runner.step([(runner.new_sequence(), token_ids)])
    assert_same_logits(logits, full_pass(example.oracle, token_ids))
