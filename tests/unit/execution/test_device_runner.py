"""The accelerator's model runner on the host, over doubles of the kernels: the tokens of the host's own path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.execution.build import kv_geometry
from sglang_lite.execution.device_runner import DeviceRunner
from sglang_lite.execution.model_runner import ModelRunner
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.registry import load_model
from sglang_lite.scheduler.plan import LogprobRequest
from tests.support.host_device import HostDevice
from tests.support.kernel_doubles import HOPPER
from tests.support.kernel_doubles.capture import is_recording
from tests.support.kernel_doubles.checks import Precision
from tests.support.kernel_doubles.everything import installed_everything
from tests.support.scripted_matcher import ScriptedMatcher
from tests.support.step_plans import PlanMaker, PlannedSequence, sampling_columns
from tests.support.tiny_checkpoints import CASES, save_checkpoint

PAGE_SIZE, NUM_PAGES, NUM_ROWS, CONTEXT = 4, 64, 12, 64
PROMPTS = [[5, 9, 33, 71, 12, 90, 41, 8, 77, 23, 6], [3, 14, 15], [92, 65, 35, 89, 79], [1, 61, 80, 33, 98, 8]]
FAMILIES = ("llama", "mistral")
OTHER_FAMILIES = (
    "qwen2_window",
    "qwen3",
    "qwen3_moe",
    "glm4_moe",
    "gpt_oss",
    "gemma3",
    "deepseek_v3",
    "qwen3_next",
    "kimi_linear",
)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp(request.param)
    save_checkpoint(CASES[request.param], directory)
    return str(directory)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Precision, "allow_float32", True)
    monkeypatch.setattr("sglang_lite.adapters.cuda.moe.is_capturing", is_recording)
    with installed_everything("sglang-kernel"):
        yield


def host_runner(checkpoint: str) -> ModelRunner:
    ops = CpuOperations(measure=False)
    model, description = load_model(checkpoint, ops=ops, progress=False)
    return ModelRunner(model, ops, geometry_of(description), num_rows=NUM_ROWS, seed=1)


def geometry_of(description: ModelDescription) -> KVGeometry:
    return kv_geometry(description.kv, NUM_PAGES, PAGE_SIZE, torch.float32)


def device_runner(checkpoint: str, device: HostDevice, **options: object) -> DeviceRunner:
    ops = CudaOperations(torch.device("cpu"), HOPPER, workspace_bytes=64)
    model, description = load_model(checkpoint, ops=ops, progress=False)
    runner = DeviceRunner(
        model,
        ops,
        device,
        geometry_of(description),
        num_rows=NUM_ROWS,
        context_length=CONTEXT,
        seed=1,
        **options,  # type: ignore[arg-type]
    )
    runner.pool.fill_(torch.nan)
    return runner


def captured_runner(checkpoint: str, device: HostDevice, **options: object) -> DeviceRunner:
    """After the steps that a server's start runs."""
    runner = device_runner(checkpoint, device, batch_sizes=(1, 2, 4), **options)
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    sequence = PlannedSequence(0)
    runner.run(maker.plan([], [(sequence, [0] * 3)]))
    runner.run(maker.plan([sequence]))
    runner.capture()
    runner.pool.fill_(torch.nan)
    return runner


def serve(runner: ModelRunner | DeviceRunner) -> list[list[int]]:
    """Four requests that come and go: prefill alone, chunks beside decode rows, decode of 1 to 4 rows."""
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    sequences = [PlannedSequence(row) for row in (3, 0, 7, 5)]
    tokens: list[list[int]] = [[] for _ in sequences]

    def step(decode: list[int], prefill: list[tuple[int, list[int]]] = (), sample: list[int] | None = None) -> None:  # type: ignore[assignment]
        plan = maker.plan(
            [sequences[index] for index in decode],
            [(sequences[index], chunk) for index, chunk in prefill],
            sample=sample,
        )
        output = runner.run(plan)
        members = [*decode, *(index for index, _ in prefill)]
        for place, token in zip(plan.sample_index.tolist(), output.tokens.tolist(), strict=True):
            tokens[members[place]].append(token)

    step([], [(0, PROMPTS[0])])
    for _ in range(3):
        step([0])
    step([0], [(1, PROMPTS[1]), (2, PROMPTS[2][:2])], sample=[0, 1])
    step([0, 1], [(2, PROMPTS[2][2:])])
    for _ in range(3):
        step([0, 1, 2])
    step([2, 0], [(3, PROMPTS[3])])
    for _ in range(4):
        step([3, 1, 0, 2])
    for _ in range(2):
        step([2, 3])
    return tokens


def unused_pages() -> list[int]:
    """Pages that ``serve`` gives to nobody. The padding of a batch starts in page 0 when it does not know better."""
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    unused = maker._free[: NUM_PAGES // 2]
    assert 0 in unused
    return unused


def test_tokens_are_those_of_the_host(checkpoint: str) -> None:
    expected = serve(host_runner(checkpoint))
    assert all(len(set(tokens)) > 2 for tokens in expected)
    assert serve(device_runner(checkpoint, HostDevice())) == expected


@pytest.mark.parametrize("side_by_side", [False, True])
def test_tokens_with_captured_decode_steps(checkpoint: str, side_by_side: bool) -> None:
    device = HostDevice()
    runner = captured_runner(checkpoint, device, side_by_side=side_by_side)
    assert runner.captured_batch_sizes == (1, 2, 4)
    assert serve(runner) == serve(host_runner(checkpoint))
    assert device.captures == 3
    assert ("wait on prefill" in device.log) is side_by_side
    # Padding wrote somewhere, but into no page of the pool: what no sequence used is as it was.
    assert runner.pool[unused_pages()].isnan().all()


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_other_families(family: str, tmp_path: Path) -> None:
    """Experts, latent rows, sinks and windows in captured steps; a model with recurrent states is not captured."""
    save_checkpoint(CASES[family], tmp_path)
    runner = captured_runner(str(tmp_path), HostDevice(), side_by_side=True)
    assert bool(runner.captured_batch_sizes) is not CASES[family].recurrent
    assert serve(runner) == serve(host_runner(str(tmp_path)))


def test_side_by_side_without_graphs(checkpoint: str) -> None:
    runner = device_runner(checkpoint, HostDevice(), side_by_side=True)
    assert serve(runner) == serve(host_runner(checkpoint))


def test_batches_without_a_graph_of_their_own(checkpoint: str) -> None:
    """Without padding only exact sizes are replayed, and a batch larger than all of them runs as it is."""
    device = HostDevice()
    runner = captured_runner(checkpoint, device, pad_graphs=False)
    assert serve(runner) == serve(host_runner(checkpoint))


def test_steps_are_launched_ahead(checkpoint: str) -> None:
    """Three steps are queued before the first is collected: each feeds on what the one before left on the device."""
    expected = serve(host_runner(checkpoint))[0][:4]
    runner = captured_runner(checkpoint, HostDevice())
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    sequence = PlannedSequence(3)
    plans = [maker.plan([], [(sequence, PROMPTS[0])]), *(maker.plan([sequence]) for _ in range(3))]
    pending = [runner.launch(plan) for plan in plans]
    assert [int(step.result().tokens[0]) for step in pending] == expected


def test_parameters_give_the_tokens_of_the_host(checkpoint: str) -> None:
    """Seeds, filters, penalties, bias, suppressed tokens."""
    outputs = []
    for runner in (host_runner(checkpoint), captured_runner(checkpoint, HostDevice())):
        maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
        sequences = [PlannedSequence(row) for row in range(4)]
        columns = sampling_columns(
            4,
            temperature=[0.0, 1.5, 0.8, 1.2],
            top_k=[-1, 5, -1, 3],
            top_p=[1.0, 0.9, 0.7, 1.0],
            min_p=[0.0, 0.0, 0.02, 0.1],
            seed=[-1, 7, 8, 9],
            repetition_penalty=[1.4, 1.0, 1.3, 1.0],
            presence_penalty=[0.5, 0.0, 0.0, 0.0],
            frequency_penalty=[0.0, 0.0, 0.7, 0.0],
            logit_bias={1: {4: 2.5, 9: -3.0}, 3: {17: 1.0}},
        )
        tokens = []
        plan = maker.plan([], list(zip(sequences, PROMPTS, strict=True)), sampling=columns)
        for count in range(6):
            plan = _with(
                plan, generated=np.full(4, count, dtype=np.int32), suppressed={2: (3, 5), 0: (tokens or [[1]])[-1][:1]}
            )
            tokens.append(tuple(runner.run(plan).tokens.tolist()))
            plan = maker.plan(sequences, sampling=columns)
        outputs.append(tokens)
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) > 1


def _with(plan: object, **changes: object) -> object:
    from dataclasses import replace

    return replace(plan, **changes)  # type: ignore[type-var]


def test_draws_without_a_seed_stay_within_the_filters(checkpoint: str) -> None:
    runner = device_runner(checkpoint, HostDevice())
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    drawn = set()
    columns = sampling_columns(1, temperature=5.0, top_k=3)
    for _ in range(40):
        sequence = PlannedSequence(0, [], 0)
        drawn.add(
            int(
                runner.run(PlanMaker(PAGE_SIZE, NUM_PAGES).plan([], [(sequence, PROMPTS[0])], sampling=columns)).tokens[
                    0
                ]
            )
        )
    greedy = int(runner.run(maker.plan([], [(PlannedSequence(1), PROMPTS[0])])).tokens[0])
    assert greedy in drawn and len(drawn) == 3


def test_scores_are_those_of_the_host(checkpoint: str) -> None:
    scored = []
    request = LogprobRequest(1, 1, 3, 5, np.array(PROMPTS[2][3:], dtype=np.int32), True, 2, (4, 7))
    for runner in (host_runner(checkpoint), device_runner(checkpoint, HostDevice())):
        maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
        plan = maker.plan([], [(PlannedSequence(0), PROMPTS[1]), (PlannedSequence(1), PROMPTS[2])], logprobs=[request])
        scored.append(runner.run(plan).scored[0])
    np.testing.assert_allclose(scored[1].logprobs, scored[0].logprobs, atol=1e-4)
    np.testing.assert_array_equal(scored[1].top_ids, scored[0].top_ids)
    np.testing.assert_allclose(scored[1].extra_logprobs, scored[0].extra_logprobs, atol=1e-4)


def test_a_row_whose_logits_are_not_finite(checkpoint: str) -> None:
    runner = captured_runner(checkpoint, HostDevice())
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    healthy, faulty = PlannedSequence(0), PlannedSequence(1)
    runner.run(maker.plan([], [(healthy, PROMPTS[0]), (faulty, PROMPTS[0])]))
    runner.pool[faulty.pages[0]] = torch.nan
    assert [runner.run(maker.plan([healthy, faulty])).tokens.tolist()[1] for _ in range(2)] == [-1, -1]


def test_pages_are_copied_before_the_pass(checkpoint: str) -> None:
    runner = device_runner(checkpoint, HostDevice())
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    sequence, twin = PlannedSequence(0), PlannedSequence(1)
    first = int(runner.run(maker.plan([], [(sequence, PROMPTS[0])])).tokens[0])
    twin.pages = [*sequence.pages[:-1], maker._free.pop()]
    twin.num_tokens = sequence.num_tokens
    copies = np.array([[sequence.pages[-1], twin.pages[-1]]], dtype=np.int32)
    expected = [int(runner.run(maker.plan([sequence])).tokens[0]) for _ in range(3)]
    plan = _with(maker.plan([twin]), page_copies=copies, input_ids=np.array([first], dtype=np.int32))
    assert [
        int(runner.run(plan).tokens[0]),
        *(int(runner.run(maker.plan([twin])).tokens[0]) for _ in range(2)),
    ] == expected  # type: ignore[arg-type]


def constrained(runner: ModelRunner | DeviceRunner, script: ScriptedMatcher | None) -> list[list[int]]:
    """Tokens of two rows over four steps, the first one with a grammar; on a device all are launched at once."""
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    first, second = PlannedSequence(2), PlannedSequence(9)
    plans = [maker.plan([], [(first, PROMPTS[0]), (second, PROMPTS[1])])]
    plans += [maker.plan([first, second]) for _ in range(3)]
    if script is not None:
        plans = [replace(plan, matchers={0: script}) for plan in plans]
    if isinstance(runner, DeviceRunner):
        steps = [runner.launch(plan) for plan in plans]
        return [step.result().tokens.tolist() for step in steps]
    return [runner.run(plan).tokens.tolist() for plan in plans]


def test_grammars_of_steps_launched_ahead(checkpoint: str) -> None:
    """A mask needs the token of the step before, which nobody has collected yet."""
    free = constrained(device_runner(checkpoint, HostDevice()), None)
    wanted = [7, 30, 2]
    assert [row[0] for row in free][:3] != wanted
    on_device, on_host = ScriptedMatcher(*wanted), ScriptedMatcher(*wanted)
    tokens = constrained(device_runner(checkpoint, HostDevice()), on_device)
    assert [row[0] for row in tokens[:3]] == wanted
    assert [row[1] for row in tokens] == [row[1] for row in free], "the other row is drawn as ever"
    assert tokens[3][0] >= 0, "behind the end anything may be drawn"
    assert on_device.is_terminated
    assert constrained(host_runner(checkpoint), on_host) == tokens
