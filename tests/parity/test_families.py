"""Every family equals transformers: in one pass, step by step over pages, and with shared prefixes.

A row of ``CASES`` is all that a further family needs.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_lite.adapters.base import Operations
from sglang_lite.models.checkpoint import Checkpoint
from sglang_lite.models.registry import load_model
from sglang_lite.types import StartupError
from tests.support.model_library import Library, full_pass
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_checkpoints import CASES, save_checkpoint

each_case = pytest.mark.parametrize("case", list(CASES))
each_operations = pytest.mark.parametrize("operations", ["reference", "cpu"])
each_page_size = pytest.mark.parametrize(
    ("operations", "page_size"), [("cpu", 1), ("cpu", 4), ("cpu", 16), ("reference", 4)]
)


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
@each_case
def test_chunks_and_decode_equal_one_pass(library: Library, case: str, operations: str, page_size: int) -> None:
    example = library.example(case)
    runner = PagedRunner(library.model(case, operations), library.operations[operations], page_size)
    sequence = runner.new_sequence()
    bounds = [0, 5, 14, 16, *range(17, len(example.token_ids) + 1)]
    pieces = [runner.step([(sequence, example.token_ids[start:stop])])[0] for start, stop in itertools.pairwise(bounds)]
    assert_same_logits(torch.cat(pieces), example.logits, CASES[case].tolerance)


@each_page_size
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
@pytest.mark.parametrize(
    ("case", "has_experts"),
    [
        ("smollm2", False),
        ("mistral", False),
        ("qwen2", False),
        ("qwen3", False),
        ("gemma3_wrapper", False),
        ("qwen3_moe", True),
        ("glm4_moe", True),
        ("gpt_oss_plain_rope", True),
    ],
)
def test_bfloat16_is_near_float32(library: Library, case: str, has_experts: bool, operations: str) -> None:
    """Rounding may choose another expert for a token now and then, which changes that token's logits."""
    example, ops = library.example(case), library.operations[operations]
    model, _ = load_model(example.directory, ops=ops, dtype=torch.bfloat16)
    runner = PagedRunner(model, ops, page_size=16, dtype=torch.bfloat16)
    [logits] = runner.step([(runner.new_sequence(), example.token_ids)])
    assert logits.dtype == torch.float32
    error = (logits - example.logits).abs()
    assert 0 < error.mean(-1).median().item() < 0.05  # logits have a standard deviation of about 1.6
    assert (error.amax(-1) > 0.5).float().mean().item() <= (0.1 if has_experts else 0)


@pytest.mark.parametrize("case", ["qwen3", "gpt_oss", "gemma3_wrapper"])
def test_c954_sharded_checkpoint_loads_and_a_missing_shard_is_named(
    tmp_path: Path, library: Library, case: str
) -> None:
    oracle = save_checkpoint(CASES[case], tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    ops: Operations = library.operations["cpu"]
    model, _ = load_model(tmp_path, ops=ops)
    runner = PagedRunner(model, ops, page_size=4)
    token_ids = list(range(3, 23))
    [logits] = runner.step([(runner.new_sequence(), token_ids)])
    assert_same_logits(logits, full_pass(oracle, token_ids))

    shards[1].unlink()
    with pytest.raises(StartupError, match=f"missing checkpoint shard .*{shards[1].name}"):
        load_model(tmp_path, ops=ops)


@pytest.mark.parametrize("case", ["smollm2", "gemma3"])
def test_c956_a_tied_model_needs_no_output_matrix_and_an_untied_one_does(
    tmp_path: Path, library: Library, case: str
) -> None:
    """That the tied model is right without the matrix is what the other tests of these cases say."""
    save_checkpoint(CASES[case], tmp_path)
    assert "lm_head.weight" not in Checkpoint.open(tmp_path).tensors
    with pytest.raises(StartupError, match=r"missing checkpoint tensor lm_head\.weight"):
        load_model(tmp_path, ops=library.operations["cpu"], overrides={"tie_word_embeddings": False})


def test_an_output_matrix_counts_whatever_a_wrapper_says(tmp_path: Path, library: Library) -> None:
    """The two configurations of a wrapped model disagree; the matrix in the checkpoint is used."""
    oracle = save_checkpoint(CASES["gemma3_wrapper"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert not any("lm_head" in name for name in tensors)
    matrix = torch.randn(128, 64, generator=torch.Generator().manual_seed(2))
    save_file(tensors | {"lm_head.weight": matrix}, file, metadata={"format": "pt"})
    ops = library.operations["cpu"]
    model, description = load_model(tmp_path, ops=ops)
    assert not description.tie_word_embeddings
    runner = PagedRunner(model, ops, page_size=4)
    token_ids = list(range(3, 23))
    [logits] = runner.step([(runner.new_sequence(), token_ids)])
    with torch.no_grad():
        hidden = oracle.model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
    assert_same_logits(logits, hidden @ matrix.T)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_both_spellings_of_a_wrapped_decoder(tmp_path: Path, library: Library, prefix: str) -> None:
    example = library.example("gemma3_wrapper")
    save_checkpoint(CASES["gemma3_wrapper"], tmp_path)
    file = tmp_path / "model.safetensors"
    renamed = {
        re.sub(r"^(model\.language_model|language_model\.model)\.", prefix, name): tensor
        for name, tensor in load_file(file).items()
    }
    assert f"{prefix}embed_tokens.weight" in renamed
    save_file(renamed, file, metadata={"format": "pt"})
    ops = library.operations["cpu"]
    runner = PagedRunner(load_model(tmp_path, ops=ops)[0], ops, page_size=4)
    [logits] = runner.step([(runner.new_sequence(), example.token_ids)])
    assert_same_logits(logits, example.logits)


def test_positions_past_the_models_context_can_be_prepared(library: Library) -> None:
    """A longer context on request: the rotary table covers it."""
    example, ops = library.example("llama"), library.operations["reference"]
    model, description = load_model(example.directory, ops=ops, context_length=300)
    runner = PagedRunner(model, ops, page_size=16)
    token_ids = (example.token_ids * 7)[:300]
    assert description.context_length < len(token_ids)
    [logits] = runner.step([(runner.new_sequence(), token_ids)])
    assert_same_logits(logits, full_pass(example.oracle, token_ids))
