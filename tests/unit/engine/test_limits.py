"""Length rules and vocabulary checks, number by number."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang_lite.config import ServerConfig
from sglang_lite.engine.info import EngineInfo, KvCacheInfo
from sglang_lite.engine.limits import prepare_prompt
from sglang_lite.engine.parts import CPU_CHUNK_TOKENS, make_scheduler
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.types import RequestError, SamplingParams, StartupError

INFO = EngineInfo(
    context_length=100,
    vocab_size=50,
    eos_token_ids=(2,),
    num_pages=40,
    page_size=2,
    max_total_tokens=80,
    max_req_input_len=80,
    max_running_requests=4,
    kv_cache=KvCacheInfo(
        dtype="float32",
        page_size=2,
        num_layers=1,
        kv_heads=1,
        head_dim=1,
        kv_tensors_per_token=2,
        bytes_per_token=8,
        page_size_bytes=16,
    ),
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    dtype="float32",
    device="cpu",
)
LARGE_POOL = msgspec.structs.replace(INFO, num_pages=500, max_total_tokens=1000, max_req_input_len=100)


def request(max_new_tokens: int | None = 10, **more: Any) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, **more.pop("sampling", {}))
    return GenerateRequest(request_id="r", sampling=sampling, **more)


def prepared(
    prompt: int, max_new_tokens: int | None, info: EngineInfo, *, cut: bool = False, **more: Any
) -> tuple[int, int]:
    result = prepare_prompt(request(max_new_tokens, **more), [1] * prompt, info, allow_auto_truncate=cut)
    return len(result.token_ids), result.max_new_tokens


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "info", "expected"),
    [
        (1, 10, INFO, (1, 10)),
        (1, 0, INFO, (1, 0)),
        (90, 10, LARGE_POOL, (90, 10)),
        (99, 1, LARGE_POOL, (99, 1)),
        (60, 40, INFO, (60, 20)),
        (79, 5, INFO, (79, 1)),
        (10, None, LARGE_POOL, (10, 90)),
        (10, None, INFO, (10, 70)),
    ],
)
def test_what_fits_is_taken_and_capped_by_the_pool(
    prompt: int, max_new_tokens: int | None, info: EngineInfo, expected: tuple[int, int]
) -> None:
    assert prepared(prompt, max_new_tokens, info) == expected


def test_a_limit_that_nobody_asked_for_is_cut_to_the_context() -> None:
    assert prepared(95, 10, LARGE_POOL, limit_is_default=True) == (95, 5)
    assert prepared(20, 10, LARGE_POOL, limit_is_default=True) == (20, 10)
    with pytest.raises(RequestError, match="longer than the model's context"):
        prepared(100, 10, LARGE_POOL, limit_is_default=True)


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "info", "message"),
    [
        (100, 1, LARGE_POOL, "The input (100 tokens) is longer than the model's context length (100 tokens)."),
        (
            91,
            10,
            LARGE_POOL,
            "Requested token count exceeds the model's maximum context length of 100 tokens. You requested a total of "
            "101 tokens: 91 tokens from the input messages and 10 tokens for the completion. Please reduce the number "
            "of tokens in the input messages or the completion to fit within the limit.",
        ),
        (
            80,
            1,
            INFO,
            "Input length (80 tokens) exceeds the maximum allowed length (80 tokens). Use a shorter input or enable "
            "--allow-auto-truncate.",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_sglangs_words(
    prompt: int, max_new_tokens: int, info: EngineInfo, message: str
) -> None:
    with pytest.raises(RequestError) as refused:
        prepared(prompt, max_new_tokens, info)
    assert (refused.value.message, refused.value.status) == (message, 400)


def test_truncation_cuts_prompt_and_output() -> None:
    assert prepared(500, 50, LARGE_POOL, cut=True) == (99, 1)
    assert prepared(500, 50, INFO, cut=True) == (79, 1)
    assert prepared(90, 50, LARGE_POOL, cut=True) == (90, 10)


@pytest.mark.parametrize("bad", [-1, 50, 2**31, 2**63, "x", None])
def test_an_id_outside_the_vocabulary_is_named(bad: Any) -> None:
    with pytest.raises(RequestError, match=r"input_ids.*49") as refused:
        prepare_prompt(request(input_ids=[1, bad]), [1, bad], INFO, allow_auto_truncate=False)
    assert refused.value.field == "input_ids"


@pytest.mark.parametrize("field", ["prompt[3]", "messages"])
def test_errors_name_the_field_that_the_prompt_came_from(field: str) -> None:
    for token_ids in ([], [99], [1] * 100):
        with pytest.raises(RequestError) as refused:
            prepare_prompt(request(text="x", prompt_field=field), token_ids, INFO, allow_auto_truncate=False)
        assert refused.value.field == field
        assert field in refused.value.message or len(token_ids) == 100


def test_the_bias_message_is_sglangs() -> None:
    with pytest.raises(RequestError, match=r"^logit_bias must has keys in \[0, 49\], got 50\.$"):
        prepare_prompt(request(sampling={"logit_bias": {50: 1.0}}), [1], INFO, allow_auto_truncate=False)


@pytest.mark.parametrize("start", [-1, 0, 3])
def test_scored_positions_may_start_anywhere_up_to_the_end(start: int) -> None:
    prepare_prompt(request(logprob_start_len=start), [1, 2, 3], INFO, allow_auto_truncate=False)
    with pytest.raises(RequestError, match="higher than the number of input tokens 3"):
        prepare_prompt(request(logprob_start_len=4), [1, 2, 3], INFO, allow_auto_truncate=False)


def test_the_scheduler_follows_the_configuration() -> None:
    config = ServerConfig(model_path="m", device="cpu", schedule_policy="lpm", request_waiting_timeout=2.0)
    made = make_scheduler(config, INFO).config
    assert (made.num_pages, made.page_size, made.context_length) == (40, 2, 100)
    assert (made.policy, made.waiting_timeout, made.running_timeout) == ("lpm", 2.0, 0.0)
    assert (made.chunked_prefill_size, made.overlap) == (CPU_CHUNK_TOKENS, True)
    chunk = make_scheduler(ServerConfig(model_path="m", device="cpu", chunked_prefill_size=-1), INFO).config
    assert chunk.chunked_prefill_size == -1
    padded = msgspec.structs.replace(INFO, eos_token_ids=(2, 50, 70))
    assert make_scheduler(config, padded).config.eos_token_ids == (2,), "50 and 70 have no logit to suppress"
    unknown = config.model_copy(update={"schedule_policy": "astrology"})
    with pytest.raises(StartupError, match=r"astrology.*fcfs"):
        make_scheduler(unknown, INFO)
