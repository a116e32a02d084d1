"""Speculation by n-grams: the tokens are those of decoding one by one, in fewer steps; pages are all given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_lite import Engine
from sglang_lite.configuration.loading import load_config
from sglang_lite.execution.sampler import Sampler
from sglang_lite.execution.verification import verification_of
from sglang_lite.scheduler.plan import StepPlan
from sglang_lite.types import StartupError
from tests.support.step_plans import sampling_columns
from tests.support.tiny_checkpoints import CASES, save_checkpoint

PROMPTS = [[5, 6, 7, 8, 9] * 4, [40, 41], [3, 4, 5, 6, 7, 8, 60, 61, 62], [9] * 11, list(range(10, 50))]
GREEDY = {"temperature": 0, "max_new_tokens": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("speculation")
    save_checkpoint(CASES["qwen3"], directory)
    return directory


def start(model: Path, **options: Any) -> Engine:
    settings = {"max_total_tokens": 1024, "max_running_requests": 8, "page_size": 4, "random_seed": 1, **options}
    return Engine(model_path=str(model), device="cpu", skip_tokenizer_init=True, **settings)


def speculating(model: Path, **options: Any) -> Engine:
    return start(model, speculative_algorithm="NGRAM", **options)


def tokens(engine: Engine, sampling: Any, **options: Any) -> list[tuple[list[int], Any]]:
    results = engine.generate(input_ids=PROMPTS, sampling_params=sampling, **options)
    core = engine._core._scheduler
    core.audit()
    stats = core.stats()
    assert stats.held_pages == 0
    return [(result["output_ids"], result["meta_info"]["finish_reason"]) for result in results]


SAMPLINGS = {
    "greedy": GREEDY,
    "to the limit": {**GREEDY, "ignore_eos": True, "max_new_tokens": 33},
    "stop tokens": {**GREEDY, "ignore_eos": False, "stop_token_ids": [17, 33, 77, 101]},
    "seeded": {"temperature": 0.7, "sampling_seed": 11, "top_p": 0.9, "max_new_tokens": 30, "ignore_eos": True},
    "cold": {"temperature": 0.2, "sampling_seed": 5, "max_new_tokens": 30, "ignore_eos": True},
    "penalties": {**GREEDY, "frequency_penalty": 0.4},
    "bias": {**GREEDY, "logit_bias": {"20": 5.0, "21": 4.5}, "ignore_eos": True},
    "least tokens": {**GREEDY, "min_new_tokens": 9},
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 1, "max_total_tokens": 160, "speculative_num_draft_tokens": 2},
        {"page_size": 16, "speculative_num_draft_tokens": 16, "chunked_prefill_size": 16},
    ],
    ids=str,
)
def test_the_output_is_that_of_decoding_one_by_one(model: Path, options: dict[str, Any]) -> None:
    plain = {name: value for name, value in options.items() if not name.startswith("speculative")}
    with start(model, **plain) as one, speculating(model, **options) as several:
        for name, sampling in SAMPLINGS.items():
            assert tokens(several, sampling) == tokens(one, sampling), name
        mixed = [list(SAMPLINGS.values())[index] for index in range(len(PROMPTS))]
        assert tokens(several, mixed) == tokens(one, mixed)
        scored = tokens(several, GREEDY, return_logprob=True)
        assert scored == tokens(one, GREEDY, return_logprob=True)


def test_repetition_takes_fewer_steps(model: Path) -> None:
    bias = {"temperature": 0, "max_new_tokens": 80, "ignore_eos": True, "logit_bias": {"20": 100.0}}
    with start(model) as one, speculating(model) as several:
        assert tokens(several, bias) == tokens(one, bias)
        plain, guessed = one._core._scheduler.stats(), several._core._scheduler.stats()
        assert guessed.generated_tokens == plain.generated_tokens
        assert guessed.steps < plain.steps / 4
        assert guessed.accepted_tokens > 0.8 * guessed.drafted_tokens


def test_draws_without_a_seed_follow_the_model() -> None:
    """Whether a guess is accepted or not, what is drawn has the frequencies of the model's own distribution."""
    count, guess = 4000, 2
    first, second = torch.tensor([0.5, 1.5, 1.0, -1.0]), torch.tensor([2.0, 0.0, 0.5, 1.0])
    plan = StepPlan(
        step=0,
        num_decode=0,
        rows=np.arange(count, dtype=np.int32),
        query_lens=np.full(count, 2, dtype=np.int32),
        input_ids=np.tile(np.array([1, guess], dtype=np.int32), count),
        positions=np.tile(np.array([5, 6], dtype=np.int32), count),
        slot_mapping=np.zeros(2 * count, dtype=np.int64),
        kv_lens=np.full(count, 7, dtype=np.int32),
        page_table=np.zeros((count, 1), dtype=np.int32),
        sample_index=np.arange(count, dtype=np.int32),
        sampling=sampling_columns(count, temperature=1.0),
        generated=np.zeros(count, dtype=np.int32),
        suppressed={},
        resumed={},
        page_copies=np.empty((0, 2), dtype=np.int32),
        logprobs=[],
        draft_lens=np.ones(count, dtype=np.int32),
    )
    assert plan.draft_lens is not None
    draws = verification_of(plan, plan.draft_lens)
    logits = torch.stack([first, second]).repeat(count, 1)
    sampler = Sampler(4, torch.device("cpu"), seed=3)
    drawn = sampler.sample(logits, draws.columns, draws.rows, draws.generated, {}, {})
    tokens, counts = draws.accept(plan, drawn.int().numpy())
    firsts = tokens[np.cumsum(counts) - counts]
    assert set(counts.tolist()) == {1, 2}
    assert ((counts == 2) == (firsts == guess)).all()
    seconds = tokens[(np.cumsum(counts) - 1)[counts == 2]]
    for found, scores in ((firsts, first), (seconds, second)):
        shares = np.bincount(found, minlength=4) / len(found)
        expected = scores.softmax(0).numpy()
        assert (abs(shares - expected) < 4 * np.sqrt(expected / len(found))).all()


def test_what_is_not_built_is_refused_by_name(model: Path) -> None:
    with pytest.raises(StartupError, match="--speculative-algorithm EAGLE3 is not supported"):
        start(model, speculative_algorithm="EAGLE3")


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-token-map", "map.pt"],
        ["--speculative-accept-threshold-single", "0.5"],
    ],
)
def test_options_of_draft_models_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(["--model-path", "m", *words])
    assert words[0] in capsys.readouterr().err


def test_the_number_of_verified_tokens_counts_the_newest_one() -> None:
    assert load_config(["--model-path", "m"]).guessed_tokens == 0
    assert load_config(["--model-path", "m", "--speculative-algorithm", "NGRAM"]).guessed_tokens == 7
    words = ["--speculative-algorithm", "ngram", "--speculative-num-draft-tokens", "4"]
    assert load_config(["--model-path", "m", *words]).guessed_tokens == 3
