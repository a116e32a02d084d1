"""Results of /generate from snapshots that a slow reader looks at late."""

from __future__ import annotations

from sglang_lite.frontend.request import FinishReason, GenerateRequest, GenerationOutput, TokenLogprobs
from sglang_lite.server.native_format import NativeFormat, NativeWriter


def writer(*, incremental: bool = False, with_timings: bool = False) -> NativeWriter:
    form = NativeFormat(
        tokenizer=None,
        weight_version="default",
        is_batch=True,
        incremental=incremental,
        text_in_logprobs=False,
        return_prompt_token_ids=False,
        with_timings=with_timings,
    )
    return NativeWriter(form, [GenerateRequest(request_id="r", input_ids=[1], return_logprob=True)])


def test_a_late_look_at_a_snapshot_shows_its_own_tokens_only() -> None:
    """The lists of a snapshot are live: tokens that came since belong to the next event."""
    ids, logprobs = [5, 6], [TokenLogprobs(5, -0.5), TokenLogprobs(6, -0.6)]
    early = GenerationOutput("r", "", ids, None, 1, 1, 0, output_logprobs=logprobs)
    late = GenerationOutput("r", "", ids, FinishReason("length", length=2), 1, 2, 0, output_logprobs=logprobs)
    made = writer(incremental=True)
    events = [*made.events(0, early), *made.events(0, late)]
    assert [event["output_ids"] for event in events] == [[5], [6]]
    shown = [event["meta_info"]["output_token_logprobs"] for event in events]
    assert shown == [[[-0.5, 5, None]], [[-0.6, 6, None]]]
    whole = next(iter(writer().events(0, early)))["meta_info"]
    assert whole["output_token_logprobs_length"] == len(whole["output_token_logprobs"]) == 1


def test_timings_of_an_unstreamed_reply_know_the_first_token() -> None:
    made = writer(with_timings=True)
    began = made._started_at
    output = GenerationOutput(
        "r", "", [5, 6, 7], FinishReason("length", length=3), 1, 3, 0, first_token_at=began + 1, finished_at=began + 2
    )
    meta = made.result(0, output)["meta_info"]
    assert abs(meta["first_token_latency"] - 1) < 1e-6
    assert abs(meta["decode_throughput"] - 2) < 1e-6
