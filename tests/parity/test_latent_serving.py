"""Models with latent attention behind the engine: scheduler, prefix cache, chunks and preemption give their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_lite.engine.offline import Engine
from tests.support.model_library import Example, Library, full_pass

FAMILIES = ["deepseek_v2_lite", "deepseek_v32", "glm_moe_dsa_shared_choice"]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def start(example: Example, **options: Any) -> Engine:
    return Engine(model_path=str(example.directory), device="cpu", skip_tokenizer_init=True, page_size=4, **options)


def continued(example: Example, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers, each from a full pass: its caches of sparse attention are not exact."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(full_pass(example.oracle, ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(params=FAMILIES)
def served(request: pytest.FixtureRequest, library: Library) -> Iterator[tuple[Example, Engine]]:
    example = library.example(request.param)
    with start(example, max_total_tokens=1024, chunked_prefill_size=24) as engine:
        yield example, engine


def test_c951_served_tokens_and_log_probabilities_equal_transformers(served: tuple[Example, Engine]) -> None:
    """C951: input log probabilities of a prompt of 64 tokens; then the same prompt again, from the prefix cache."""
    example, engine = served
    ids = (example.token_ids * 2)[:64]
    expected = full_pass(example.oracle, ids).log_softmax(-1)
    result = engine.generate(
        input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": 8}, return_logprob=True, logprob_start_len=0
    )
    given = [entry[0] for entry in result["meta_info"]["input_token_logprobs"][1:]]
    wanted = expected[torch.arange(63), torch.tensor(ids[1:])]
    assert (torch.tensor(given) - wanted).abs().max().item() <= 1e-3
    # Where a choice of keys meets equal scores, which key is kept decides, and the oracle keeps any of them.
    chooses = getattr(example.oracle.config, "index_topk", None) is not None
    tokens = result["output_ids"] if chooses else continued(example, ids, 8)
    assert result["output_ids"] == tokens

    again = engine.generate(input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": 8})
    assert again["meta_info"]["cached_tokens"] >= 60
    assert again["output_ids"] == tokens


def test_prompts_that_share_a_start_run_together(served: tuple[Example, Engine]) -> None:
    example, engine = served
    prompts = [example.token_ids[:length] + example.token_ids[5 : 5 + length % 7] for length in (3, 17, 30, 40, 40)]
    results = engine.generate(input_ids=prompts, sampling_params={**GREEDY, "max_new_tokens": 6})
    assert [result["output_ids"] for result in results] == [continued(example, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("family", ["deepseek_v3_yarn", "deepseek_v32"])
def test_preempted_sequences_go_on_as_if_alone(library: Library, family: str) -> None:
    example = library.example(family)
    prompts = [example.token_ids[shift : shift + 12] for shift in (0, 5, 9)]
    with start(example, max_total_tokens=64, num_reserved_decode_tokens=4) as engine:
        results = engine.generate(input_ids=prompts, sampling_params={**GREEDY, "max_new_tokens": 24})
    assert sum(result["meta_info"]["num_retractions"] for result in results) > 0, "the pool was never short"
    assert [result["output_ids"] for result in results] == [continued(example, prompt, 24) for prompt in prompts]


def test_the_pool_that_is_reported_keeps_one_row_per_token(library: Library) -> None:
    """Latent 32, rotary 8, index key 16: one float32 row of them per token and layer."""
    with start(library.example("deepseek_v32"), max_total_tokens=64) as engine:
        kv_cache = engine.info.kv_cache
    assert (kv_cache.kv_heads, kv_cache.head_dim, kv_cache.kv_tensors_per_token) == (1, 32 + 8 + 16, 1)
    assert kv_cache.bytes_per_token == 3 * 56 * 4
    assert kv_cache.page_size_bytes == 4 * kv_cache.bytes_per_token
