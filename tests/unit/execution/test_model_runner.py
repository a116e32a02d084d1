"""The model runner over a tiny random model: tokens do not depend on how a sequence was fed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.adapters.cpu import CpuOperations, shared_prefix
from sglang_lite.execution.executor import TorchExecutor
from sglang_lite.execution.model_runner import ModelRunner
from sglang_lite.execution.warm_up import warm_up
from sglang_lite.models.registry import load_model
from sglang_lite.scheduler.plan import LogprobRequest
from tests.support.step_plans import PlanMaker, PlannedSequence, sampling_columns

PAGE_SIZE = 4
NUM_PAGES = 64
PROMPT = [5, 9, 33, 71, 12, 90, 41, 8, 77, 23, 6]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    directory = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).eval().float().save_pretrained(directory)
    return str(directory)


@pytest.fixture(params=[0, 8 << 20], ids=["pool", "workspace"])
def runner(checkpoint: str, request: pytest.FixtureRequest) -> ModelRunner:
    ops = CpuOperations(measure=False, workspace_bytes=request.param)
    model, description = load_model(checkpoint, ops=ops, progress=False)
    geometry = KVGeometry(
        NUM_PAGES, PAGE_SIZE, description.num_layers, description.num_kv_heads, description.head_dim, torch.float32
    )
    runner = ModelRunner(model, ops, geometry, num_rows=4)
    runner.pool.fill_(torch.nan)
    return runner


def generate(runner: ModelRunner, maker: PlanMaker, sequence: PlannedSequence, count: int) -> list[int]:
    """Greedy tokens of a sequence whose prompt was fed and sampled."""
    return [int(runner.run(maker.plan([sequence])).tokens[0]) for _ in range(count)]


def prefilled(runner: ModelRunner, maker: PlanMaker, row: int, prompt: list[int]) -> tuple[PlannedSequence, int]:
    sequence = PlannedSequence(row)
    return sequence, int(runner.run(maker.plan([], [(sequence, prompt)])).tokens[0])


def test_chunks_mixed_with_decode_give_the_tokens_of_a_lone_run(runner: ModelRunner) -> None:
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    sequence, first = prefilled(runner, maker, 0, PROMPT)
    expected = [first, *generate(runner, maker, sequence, 9)]

    other, other_first = prefilled(runner, maker, 1, PROMPT[:3])
    other_alone = [other_first]
    chunked = PlannedSequence(2)
    tokens: list[int] = []
    for start, stop in ((0, 4), (4, 9), (9, 11)):
        sample = [0, 1] if stop == 11 else [0]
        result = runner.run(maker.plan([other], [(chunked, PROMPT[start:stop])], sample=sample))
        other_alone.append(int(result.tokens[0]))
        tokens += result.tokens[1:].tolist()
    for _ in range(9):
        result = runner.run(maker.plan([chunked, other]))
        tokens.append(int(result.tokens[0]))
        other_alone.append(int(result.tokens[1]))
    assert tokens == expected

    again, first = prefilled(runner, maker, 3, PROMPT[:3])
    assert [first, *generate(runner, maker, again, 12)] == other_alone


def test_a_row_taken_over_by_another_request(runner: ModelRunner) -> None:
    """Same row, same length, other tokens: nothing of the first may be left."""
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    sequence, first = prefilled(runner, maker, 2, PROMPT[::-1])
    expected = [first, *generate(runner, maker, sequence, 3)]
    sequence, _ = prefilled(runner, maker, 0, PROMPT[:-1])
    generate(runner, maker, sequence, 1)
    sequence, first = prefilled(runner, maker, 0, PROMPT[::-1])
    assert [first, *generate(runner, maker, sequence, 3)] == expected


@pytest.mark.parametrize("copied", [False, True], ids=["written", "copied"])
def test_the_pages_of_a_shared_prefix_taken_over_by_another_request(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    """The same pages in the same order, other tokens: a flush or an eviction and a busy moment are enough for it."""
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_TOKENS", 8)
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_TOKENS", 8)
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    later, first = prefilled(runner, maker, 3, PROMPT[::-1])
    expected = [first, *generate(runner, maker, later, 4)]

    earlier, _ = prefilled(runner, maker, 0, PROMPT)
    sharing = PlannedSequence(1, list(earlier.pages[:2]), 8)
    runner.run(maker.plan([], [(sharing, PROMPT[8:])]))
    for _ in range(2):
        runner.run(maker.plan([earlier, sharing]))
    if copied:
        again = PlannedSequence(2, list(earlier.pages[:2]), 8)
        copies = np.array(list(zip(later.pages[:2], again.pages, strict=True)), dtype=np.int32)
        result = runner.run(replace(maker.plan([], [(again, PROMPT[::-1][8:])]), page_copies=copies))
    else:
        again = PlannedSequence(2, list(earlier.pages[:2]))
        result = runner.run(maker.plan([], [(again, PROMPT[::-1])]))
    assert [int(result.tokens[0]), *generate(runner, maker, again, 4)] == expected


def test_a_step_that_failed_on_its_way_leaves_no_trace(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    sequence, first = prefilled(runner, maker, 0, PROMPT)
    expected = [first, *generate(runner, maker, sequence, 4)]
    sequence, first = prefilled(runner, maker, 1, PROMPT)
    tokens = [first, *generate(runner, maker, sequence, 2)]
    plan = maker.plan([sequence])
    calls = []

    def failing(self: CpuOperations, *operands: object) -> None:
        calls.append(1)
        raise MemoryError("between two layers")

    with monkeypatch.context() as patch:
        patch.setattr(CpuOperations, "add_rms_norm", failing)
        with pytest.raises(MemoryError):
            runner.run(plan)
    assert calls
    tokens.append(int(runner.run(plan).tokens[0]))
    tokens += generate(runner, maker, sequence, 1)
    assert tokens == expected


def test_pages_are_copied_before_the_pass(runner: ModelRunner) -> None:
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    sequence, first = prefilled(runner, maker, 0, PROMPT)
    twin = PlannedSequence(1, list(sequence.pages[:-1]), sequence.num_tokens)
    twin.pages.append(maker._free.pop())
    expected = generate(runner, maker, sequence, 3)
    copies = np.array([[sequence.pages[2], twin.pages[2]]], dtype=np.int32)
    plan = replace(maker.plan([twin]), page_copies=copies, input_ids=np.array([first], dtype=np.int32))
    tokens = [int(runner.run(plan).tokens[0]), *generate(runner, maker, twin, 2)]
    assert tokens == expected


def test_logprobs_do_not_depend_on_the_prefix_being_cached(runner: ModelRunner) -> None:
    """Scores of the same positions, fed at once and behind a prefix that another sequence wrote."""
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    scored = np.array(PROMPT[9:], dtype=np.int32)
    whole = LogprobRequest(0, 1, 9, 11, scored, True, 2)
    sequence = PlannedSequence(0)
    first = runner.run(maker.plan([], [(sequence, PROMPT)], logprobs=[whole])).scored[0]
    behind = PlannedSequence(1, list(sequence.pages[:2]), 8)
    second = runner.run(maker.plan([], [(behind, PROMPT[8:])], logprobs=[whole])).scored[0]
    np.testing.assert_allclose(second.logprobs, first.logprobs, atol=1e-4)
    np.testing.assert_array_equal(second.top_ids, first.top_ids)
    assert first.logprobs.shape == (3,) and np.isfinite(first.logprobs).all()


def test_a_faulty_request_does_not_touch_the_others(runner: ModelRunner) -> None:
    """A sequence whose keys are not finite gets no token; its neighbour and the next owner of its pages do."""
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    healthy, first = prefilled(runner, maker, 0, PROMPT)
    expected = [first, *generate(runner, maker, healthy, 4)]
    healthy, first = prefilled(runner, maker, 1, PROMPT)
    faulty, _ = prefilled(runner, maker, 2, PROMPT)
    runner.pool[faulty.pages[0]] = torch.nan
    tokens = [first]
    for _ in range(4):
        result = runner.run(maker.plan([healthy, faulty])).tokens
        tokens.append(int(result[0]))
        assert result[1] == -1
    assert tokens == expected


def test_seeded_sampling_does_not_depend_on_the_batch(runner: ModelRunner) -> None:
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    outputs = []
    for company in (False, True):
        sequence = PlannedSequence(0)
        prefill = [(sequence, PROMPT)]
        if company:
            prefill = [(PlannedSequence(1), PROMPT[2:]), (sequence, PROMPT)]
        columns = sampling_columns(len(prefill), temperature=1.0, top_p=0.9, seed=[4] * (len(prefill) - 1) + [42])
        outputs.append(int(runner.run(maker.plan([], prefill, sampling=columns)).tokens[-1]))
    assert outputs[0] == outputs[1]


def test_warm_up_and_executor(runner: ModelRunner) -> None:
    executor = TorchExecutor(runner, num_threads=1)
    warm_up(executor, runner.geometry, context_length=32)
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    sequence = PlannedSequence(0)
    executor.submit(maker.plan([], [(sequence, PROMPT)]))
    executor.submit(maker.plan([sequence]))
    tokens = [int(executor.collect().tokens[0]) for _ in range(2)]
    executor.close()
    again, first = prefilled(runner, maker, 1, PROMPT)
    assert [first, *generate(runner, maker, again, 1)] == tokens
