"""Models with recurrent layers behind the engine: whatever runs beside them, tokens are those of a solo run.

Rows are reused, prompts come in odd chunks and share beginnings, sequences are preempted and aborted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.engine.offline import Engine
from sglang_lite.execution.build import kv_geometry
from sglang_lite.execution.executor import TorchExecutor
from sglang_lite.execution.model_runner import ModelRunner
from sglang_lite.models.registry import load_model
from sglang_lite.scheduler import SchedulerConfig
from sglang_lite.types import FinishCode
from tests.support.greedy_check import assert_greedy
from tests.support.model_library import Example, Library
from tests.support.scheduler_driver import Driver
from tests.support.tiny_checkpoints import CASES

FAMILIES = ["qwen3_next", "qwen3_5", "kimi_linear"]
GREEDY = {"temperature": 0.0, "ignore_eos": True}

each_family = pytest.mark.parametrize("family", FAMILIES)


def start(example: Example, **options: Any) -> Engine:
    return Engine(model_path=str(example.directory), device="cpu", skip_tokenizer_init=True, page_size=4, **options)


@pytest.fixture(params=FAMILIES)
def served(request: pytest.FixtureRequest, library: Library) -> Iterator[tuple[Example, Engine]]:
    example = library.example(request.param)
    with start(example, max_total_tokens=1024, chunked_prefill_size=12, max_running_requests=4) as engine:
        yield example, engine


def test_a_shared_prefix_gives_the_tokens_of_no_sharing(served: tuple[Example, Engine]) -> None:
    """The same prompt twice, then one that parts from it in the middle of a page, then its continuation."""
    example, engine = served
    base = example.token_ids[:30]
    prompts = [base, base, [*base[:21], 5, 6, 7], [*base, *example.token_ids[:9]]]
    for prompt in prompts:
        result = engine.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 7})
        assert result["meta_info"]["cached_tokens"] == 0  # nothing keeps the state behind a prefix
        assert_greedy(example.oracle, prompt, result["output_ids"])


def test_more_requests_than_rows_run_in_odd_chunks(served: tuple[Example, Engine]) -> None:
    example, engine = served
    prompts = [example.token_ids[shift : shift + length] for shift, length in enumerate((1, 2, 7, 13, 29, 40, 3, 25))]
    results = engine.generate(input_ids=prompts, sampling_params={**GREEDY, "max_new_tokens": 9})
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result["output_ids"]) == 9
        assert_greedy(example.oracle, prompt, result["output_ids"])


def test_choices_of_one_prompt_have_a_state_each(served: tuple[Example, Engine]) -> None:
    example, engine = served
    prompt = example.token_ids[3:20]
    parameters = {**GREEDY, "max_new_tokens": 6, "n": 3}
    results = engine.generate(input_ids=prompt, sampling_params=parameters)
    assert len(results) == 3
    for result in results:
        assert_greedy(example.oracle, prompt, result["output_ids"])


@each_family
def test_preempted_sequences_go_on_as_if_alone(library: Library, family: str) -> None:
    example = library.example(family)
    prompts = [example.token_ids[shift : shift + 12] for shift in (0, 5, 9)]
    with start(example, max_total_tokens=64) as engine:
        results = engine.generate(input_ids=prompts, sampling_params={**GREEDY, "max_new_tokens": 24})
    assert sum(result["meta_info"]["num_retractions"] for result in results) > 0, "the pool was never short"
    for prompt, result in zip(prompts, results, strict=True):
        assert_greedy(example.oracle, prompt, result["output_ids"])


@dataclass(slots=True)
class Turmoil:
    """A scheduler and a model runner under random arrivals and aborts; plans are made ahead of their tokens."""

    example: Example
    driver: Driver
    random: random.Random
    prompts: dict[int, list[int]] = field(default_factory=dict)
    num_aborted: int = 0

    def admit(self) -> None:
        """A prompt of any length, often with the beginning of another."""
        key, ids = len(self.prompts) + 1, self.example.token_ids
        start = self.random.choice((0, 0, 0, 3, 11))
        prompt = ids[start : start + self.random.randint(1, 30)]
        self.prompts[key] = prompt
        self.driver.admit([key], [prompt], max_new_tokens=self.random.choice((1, 2, 5, 30)))

    def abort(self) -> None:
        """One of the latest requests, in whatever state it is."""
        key = self.random.choice(list(self.prompts)[-6:])
        self.num_aborted += self.driver.scheduler.abort([key], self.driver.now)
        self.driver.drain()

    def turn(self) -> None:
        """Some arrivals, perhaps an abort, and a step."""
        for _ in range(self.random.choice((0, 0, 1, 2))):
            self.admit()
        if self.prompts and self.random.random() < 0.15:
            self.abort()
        self.driver.step()


@pytest.mark.parametrize(("family", "seed"), [("qwen3_next", 1), ("qwen3_5", 2), ("kimi_linear", 1)])
def test_turmoil_leaves_every_sequence_as_if_alone(library: Library, family: str, seed: int) -> None:
    example = library.example(family)
    page_size, num_pages, num_rows = 4, 20, 5
    config = SchedulerConfig(
        num_pages=num_pages,
        page_size=page_size,
        context_length=64,
        max_running_requests=num_rows,
        chunked_prefill_size=11,
        enable_radix_cache=False,
    )
    ops = CpuOperations()
    model, description = load_model(example.directory, ops=ops, progress=False)
    geometry = kv_geometry(description.kv, num_pages, page_size, model.activation_dtype)
    executor = TorchExecutor(ModelRunner(model, ops, geometry, num_rows=num_rows), num_threads=1)
    try:
        turmoil = Turmoil(example, Driver(config, executor), random.Random(seed))
        for _ in range(70):
            turmoil.turn()
        turmoil.driver.run()
    finally:
        executor.close()
    received = turmoil.driver.received
    assert sum(request.retractions for request in received.values()) > 0, "nothing was preempted"
    assert turmoil.num_aborted > 3
    assert len(turmoil.prompts) > 8 * num_rows, "rows were hardly reused"
    assert {request.finish for request in received.values()} == {FinishCode.LENGTH, FinishCode.ABORTED}
    for key, prompt in turmoil.prompts.items():
        assert_greedy(example.oracle, prompt, received[key].tokens)


def test_the_state_that_is_reported(library: Library) -> None:
    """Bytes of a request's states, from the shapes of the checkpoint; and the pages of the attention layers alone."""
    example = library.example("qwen3_next")
    with start(example, max_total_tokens=64, max_running_requests=3) as engine:
        state, kv_cache = engine.info.recurrent_state, engine.info.kv_cache
    assert CASES["qwen3_next"].options["linear_num_value_heads"] == 4
    assert state is not None
    assert (state.num_layers, state.conv_elements, state.state_elements) == (3, 128 * 3, 4 * 16 * 16)
    assert state.bytes_per_request == 3 * (128 * 3 + 4 * 16 * 16) * 4
    assert state.pool_bytes == 3 * state.bytes_per_request
    assert (kv_cache.num_layers, kv_cache.bytes_per_token) == (1, 2 * 2 * 32 * 4)
