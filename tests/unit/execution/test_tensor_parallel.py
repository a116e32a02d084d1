"""Two ranks over gloo give what one gives: tokens, log-probabilities, cached prefixes; and a failing start says why."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from sglang_lite import Engine
from sglang_lite.execution import parallel_executor, rank_launch
from sglang_lite.startup import TEST_CPU_RANKS
from sglang_lite.types import StartupError
from tests.support.tiny_checkpoints import CASES as TINY
from tests.support.tiny_checkpoints import TinyCase, save_checkpoint

# Heads split, vocabulary padded, biases; other splits are compared in ``tests/parity/test_parallel_families.py``.
CASE = TinyCase("Qwen3", {"head_dim": 16, "attention_bias": True, "vocab_size": 127})
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [40, 41], [5, 6, 7, 8, 60, 61, 62]]
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _ranks_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEST_CPU_RANKS, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def start(directory: Path, **options: Any) -> Engine:
    return Engine(
        model_path=str(directory),
        device="cpu",
        skip_tokenizer_init=True,
        max_total_tokens=512,
        max_running_requests=8,
        page_size=4,
        random_seed=1,
        **options,
    )


def answers(engine: Engine, sampling: dict[str, Any]) -> tuple[list[list[int]], list[float]]:
    """Tokens of every prompt, and the log-probabilities of all prompts and outputs one after another."""
    results = engine.generate(input_ids=PROMPTS, sampling_params=sampling, return_logprob=True, logprob_start_len=0)
    infos = [result["meta_info"] for result in results]
    scores = [
        entry[0]
        for info in infos
        for entry in (*info["input_token_logprobs"], *info["output_token_logprobs"])
        if entry[0] is not None
    ]
    return [result["output_ids"] for result in results], scores


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    with start(tmp_path) as one, start(tmp_path, tp_size=2) as two:
        assert two.info.kv_cache.kv_heads == max(1, one.info.kv_cache.kv_heads // 2)
        for sampling in (GREEDY, {**GREEDY, "temperature": 0.8, "sampling_seed": 7, "frequency_penalty": 0.3}):
            expected, expected_scores = answers(one, sampling)
            tokens, scores = answers(two, sampling)
            assert tokens == expected
            np.testing.assert_allclose(np.array(scores), np.array(expected_scores), atol=1e-4)
        again = two.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        assert again["meta_info"]["cached_tokens"] > 0
        assert again["output_ids"] == answers(one, GREEDY)[0][0]


def test_ranks_take_the_guesses_of_the_first(tmp_path: Path) -> None:
    """The draft model, whose one key/value head two ranks could not share, is whole on rank 0."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    save_checkpoint(CASE, target)
    save_checkpoint(TinyCase("Llama", {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 127}), draft)
    drafting = {"speculative_algorithm": "STANDALONE", "tp_size": 2}
    with start(target) as one:
        expected = answers(one, GREEDY)[0]
        sampling = {**GREEDY, "temperature": 0.8, "sampling_seed": 7}
        drawn = [item["output_ids"] for item in one.generate(input_ids=PROMPTS, sampling_params=sampling)]
    for directory in (draft, target):
        with start(target, speculative_draft_model_path=str(directory), **drafting) as two:
            found = [item["output_ids"] for item in two.generate(input_ids=PROMPTS, sampling_params=GREEDY)]
            assert found == expected
            again = two.generate(input_ids=PROMPTS, sampling_params=sampling)
            assert [item["output_ids"] for item in again] == drawn
            stats = two._core._scheduler.stats()
            assert stats.drafted_tokens > 20
            if directory == target:
                assert stats.accepted_tokens > 20


def test_ranks_share_experts_and_verify_guesses_together(tmp_path: Path) -> None:
    save_checkpoint(TINY["qwen3_moe"], tmp_path)
    biased = {**GREEDY, "max_new_tokens": 40, "logit_bias": {"20": 12.0, "21": 12.0}}
    with start(tmp_path) as one, start(tmp_path, tp_size=2, ep_size=2, speculative_algorithm="NGRAM") as two:
        for sampling in (biased, {**biased, "temperature": 0.5, "sampling_seed": 3}):
            results = [engine.generate(input_ids=PROMPTS, sampling_params=sampling) for engine in (one, two)]
            assert [item["output_ids"] for item in results[0]] == [item["output_ids"] for item in results[1]]
        assert two._core._scheduler.stats().accepted_tokens > 20


def test_a_rank_that_cannot_start_ends_the_start_with_its_reason(tmp_path: Path, monkeypatch: Any) -> None:
    save_checkpoint(CASE, tmp_path)
    started = rank_launch.start_rank

    def start_elsewhere(launch: Any) -> Any:
        broken = tmp_path.parent / f"{tmp_path.name}-broken"
        shutil.copytree(tmp_path, broken)
        (broken / "model.safetensors").write_bytes(b"short")
        config = launch.config.replace(str(tmp_path), str(broken))
        return started(type(launch)(config=config, rank=launch.rank, directory=launch.directory))

    monkeypatch.setattr(parallel_executor, "start_rank", start_elsewhere)
    with tempfile.TemporaryDirectory(prefix="ranks-") as own:  # short, since sockets have paths in it
        monkeypatch.setattr(tempfile, "tempdir", own)
        before = psutil.Process().children()
        _expect_the_reason(tmp_path)
        assert psutil.Process().children() == before
        assert not list(Path(own).glob("sglang-lite-ranks-*"))


def _expect_the_reason(directory: Path) -> None:
    with pytest.raises(StartupError, match=r"tensor parallel rank 1 failed: .*model\.safetensors"):
        start(directory, tp_size=2)


def test_sizes_that_do_not_divide_are_refused_with_the_numbers(tmp_path: Path) -> None:
    save_checkpoint(
        TinyCase("Llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}), tmp_path
    )
    with pytest.raises(StartupError, match="--tp-size 4 does not divide num_attention_heads 6 of LlamaForCausalLM"):
        start(tmp_path, tp_size=4)
    with pytest.raises(StartupError, match="--ep-size 2 must divide --tp-size 1"):
        start(tmp_path, ep_size=2)


def test_ranks_on_a_processor_are_refused_without_the_test_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TEST_CPU_RANKS)
    with pytest.raises(StartupError, match="the CPU reference supports only tp_size=1, requested 2"):
        start(tmp_path, tp_size=2)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = psutil.Process().children()  # of other tests of this process: servers that a module shares
    yield
    assert psutil.Process().children() == before
