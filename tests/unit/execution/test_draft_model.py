"""Guesses by a draft model: the tokens of decoding one by one, whatever the draft model says, in fewer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_lite import Engine
from sglang_lite.configuration.loading import load_config
from sglang_lite.types import StartupError
from tests.support.tiny_checkpoints import CASES, TinyCase, save_checkpoint
from tests.unit.execution.test_speculation import GREEDY, SAMPLINGS, start, tokens

PADDED = TinyCase("Llama", {"vocab_size": 160})
SHORT = TinyCase("Qwen3", {"vocab_size": 120, "head_dim": 16})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    cases = {name: CASES[name] for name in ("qwen3", "llama", "deepseek_v3", "deepseek_v32", "qwen3_next")}
    cases |= {"padded": PADDED, "short": SHORT, "foreign": TinyCase("Llama", {"vocab_size": 2000})}
    directories = {}
    for name, case in cases.items():
        directories[name] = tmp_path_factory.mktemp(name)
        save_checkpoint(case, directories[name])
    return directories


def drafting(target: Path, draft: Path, **options: Any) -> Engine:
    return start(target, speculative_algorithm="STANDALONE", speculative_draft_model_path=str(draft), **options)


@pytest.mark.parametrize(
    ("target", "draft", "options"),
    [
        ("qwen3", "qwen3", {}),
        ("qwen3", "llama", {"page_size": 1, "max_total_tokens": 160, "speculative_num_steps": 2}),
        ("llama", "short", {"page_size": 16, "speculative_num_steps": 6, "chunked_prefill_size": 16}),
        ("qwen3", "padded", {"speculative_num_draft_tokens": 2}),
        ("deepseek_v3", "llama", {"max_total_tokens": 160}),
        ("qwen3", "deepseek_v3", {}),
    ],
    ids=str,
)
def test_the_output_is_that_of_decoding_one_by_one(
    models: dict[str, Path], target: str, draft: str, options: dict[str, Any]
) -> None:
    plain = {name: value for name, value in options.items() if not name.startswith("speculative")}
    with start(models[target], **plain) as one, drafting(models[target], models[draft], **options) as several:
        for name in ("stop tokens", "seeded", "bias"):
            assert tokens(several, SAMPLINGS[name]) == tokens(one, SAMPLINGS[name]), name
        mixed = [SAMPLINGS[name] for name in ("penalties", "greedy", "least tokens", "cold", "to the limit")]
        assert tokens(several, mixed) == tokens(one, mixed)
        assert tokens(several, GREEDY, return_logprob=True) == tokens(one, GREEDY, return_logprob=True)


def both_pools_hold_the_same(engine: Engine) -> None:
    """Of every cached page, when the draft model is the served one."""
    executor: Any = engine._core._executor
    served, drafted = executor._runner.pool, executor._runner._draft._runner.pool
    pages = np.concatenate([node.pages for node in engine._core._scheduler._state.pages.cache.nodes()])
    assert len(pages) > 10
    torch.testing.assert_close(drafted[pages], served[pages], atol=1e-3, rtol=1e-3)


def test_a_draft_model_that_is_the_model_is_always_right(models: dict[str, Path]) -> None:
    """Over chunks, cached prefixes, copied pages and preemptions: both models hold the same KV wherever they look."""
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    for options in ({}, {"max_total_tokens": 120, "chunked_prefill_size": 8}):
        with drafting(models["qwen3"], models["qwen3"], **options) as engine:
            for _ in range(2):
                tokens(engine, sampling)
            for _ in range(2):  # prompts of one page: the second time it is copied
                prompts = [[first, 7, 93, 22 + first] for first in range(40, 56)]
                engine.generate(input_ids=prompts, sampling_params=sampling)
            stats = engine._core._scheduler.stats()
            assert stats.accepted_tokens == stats.drafted_tokens > 300
            # Other answers behind the cached prompts, whose pages are new.
            engine.generate(input_ids=prompts, sampling_params={**sampling, "temperature": 0.9, "sampling_seed": 3})
            both_pools_hold_the_same(engine)
            assert (stats.retractions > 0) == bool(options)
            if not options:
                assert stats.cached_tokens >= 16 * 4
                assert stats.generated_tokens > 3 * stats.decode_steps


def test_several_answers_and_aborts_beside_guesses(models: dict[str, Path]) -> None:
    sampling = {"temperature": 0.6, "sampling_seed": 4, "max_new_tokens": 24, "ignore_eos": True, "n": 3}
    with start(models["qwen3"]) as one, drafting(models["qwen3"], models["llama"]) as several:
        prompt = [9, 8, 7, 6, 5]
        expected, found = (e.generate(input_ids=prompt, sampling_params=sampling) for e in (one, several))
        assert [item["output_ids"] for item in found] == [item["output_ids"] for item in expected]
        stream = several.generate(input_ids=prompt, sampling_params={**GREEDY, "ignore_eos": True}, stream=True)
        next(iter(stream))
        stream.close()
        assert tokens(several, GREEDY) == tokens(one, GREEDY)


def test_a_start_that_cannot_be_served_says_why(models: dict[str, Path]) -> None:
    target = models["qwen3"]
    with pytest.raises(StartupError, match="name it with --speculative-draft-model-path"):
        start(target, speculative_algorithm="STANDALONE")
    with pytest.raises(StartupError, match="only --speculative-algorithm STANDALONE and EAGLE take one"):
        start(target, speculative_draft_model_path=str(models["llama"]))
    with pytest.raises(StartupError, match="a vocabulary of 2000 tokens"):
        drafting(target, models["foreign"])
    with pytest.raises(StartupError, match="carries recurrent state"):
        drafting(target, models["qwen3_next"])
    with pytest.raises(StartupError, match="sparse attention"):
        drafting(target, models["deepseek_v32"])
    with pytest.raises(StartupError, match=r"--speculative-draft-model-path .*missing"):
        drafting(target, target / "missing")


def test_the_number_of_guesses() -> None:
    words = ["--model-path", "m", "--speculative-algorithm", "standalone", "--speculative-draft-model-path", "d"]
    for more, expected in (
        ([], 3),
        (["--speculative-num-steps", "5"], 5),
        (["--speculative-num-draft-tokens", "5"], 4),
        (["--speculative-num-steps", "3", "--speculative-num-draft-tokens", "16"], 3),
        (["--speculative-num-steps", "9", "--speculative-num-draft-tokens", "3"], 2),
    ):
        assert load_config([*words, *more]).guessed_tokens == expected
