"""States of sequences over frames: text, ids, log-probabilities, finish reasons, notices to readers."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_lite.frontend.output import OutputProcessor, SequenceState
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.types import FinishCode, RequestError, SamplingParams
from tests.unit.frontend.frames import ending, frame, scores, tokens
from tests.unit.frontend.vocabularies import vocabulary

KEY = 7
EOS = 258


def processor() -> OutputProcessor:
    return OutputProcessor(vocabulary("chain"))


def start(target: OutputProcessor, key: int = KEY, *, stream: bool = False, **sampling: Any) -> SequenceState:
    request = GenerateRequest(
        request_id=f"r{key}",
        input_ids=[65],
        sampling=SamplingParams(**sampling),
        stream=stream,
        token_ids_logprob=(9, 8),
    )
    return target.add(key, request, 1, now=1.0)


def feed(target: OutputProcessor, text: bytes, key: int = KEY) -> list[int]:
    """One frame for each byte; returns the keys that the front ended."""
    ended = []
    for byte in text:
        ended += target.process(frame(tokens(key, [byte])), 2.0).finish_keys
    return ended


def test_length() -> None:
    target = processor()
    state = start(target)
    feed(target, b"BCD")
    result = target.process(frame([ending(KEY, FinishCode.LENGTH, 65)], cached_tokens=4, retractions=1), 3.0)
    assert result.changed == [state]
    assert result.finish_keys == []
    output = target.snapshot(state)
    assert output.text == "BCDA"
    assert output.output_ids == [66, 67, 68, 65]
    assert output.finish_reason is not None
    assert output.finish_reason.to_json() == {"type": "length", "length": 4}
    assert (output.prompt_tokens, output.completion_tokens, output.cached_tokens) == (1, 4, 4)
    assert output.retractions == 1
    assert (output.received_at, output.first_token_at, output.finished_at) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("sampling", "token", "text"),
    [
        ({}, EOS, "g"),
        ({"skip_special_tokens": False}, EOS, "g"),
        ({"skip_special_tokens": False, "no_stop_trim": True}, EOS, "g<|eos|>"),
        ({"no_stop_trim": True}, EOS, "g"),
        ({"stop_token_ids": (68,)}, 68, "g"),
        ({"stop_token_ids": (68,), "no_stop_trim": True}, 68, "gD"),
        # An ordinary token that the model's configuration calls its end token is part of the answer.
        ({}, 68, "gD"),
    ],
)
def test_stop_token(sampling: dict[str, Any], token: int, text: str) -> None:
    target = processor()
    state = start(target, **sampling)
    feed(target, b"g")
    target.process(frame([ending(KEY, FinishCode.STOP_TOKEN, token, token)]), 3.0)
    output = target.snapshot(state)
    assert output.text == text
    assert output.output_ids == [103, token]
    assert output.completion_tokens == 2
    assert output.finish_reason is not None
    assert output.finish_reason.to_json() == {"type": "stop", "matched": token}


def test_stop_string_counts_tokens_up_to_its_last() -> None:
    target = processor()
    state = start(target, stop=("CD",))
    assert feed(target, b"BCDA") == [KEY]
    output = target.snapshot(state)
    assert (output.text, output.completion_tokens, output.output_ids) == ("B", 3, [66, 67, 68])
    assert output.finish_reason is not None
    assert output.finish_reason.to_json() == {"type": "stop", "matched": "CD"}


def test_stop_pattern_stays_in_the_text() -> None:
    target = processor()
    state = start(target, stop_regex=("C.A",))
    assert feed(target, b"BCDABCDA") == [KEY]
    output = target.snapshot(state)
    assert output.text == "BCDA"
    assert output.finish_reason is not None
    assert output.finish_reason.matched == "C.A"


def test_tokens_behind_a_stop_string_do_not_exist() -> None:
    """Several tokens in one frame, with log-probabilities for all of them."""
    target = processor()
    state = start(target, stop=("BC",), stream=True)
    result = target.process(frame(tokens(KEY, [*b"aBCd"]), logprobs=[scores(KEY, [*b"aBCd"])]), 2.0)
    assert result.changed == [state]
    assert result.finish_keys == [KEY]
    target.process(frame(tokens(KEY, [*b"ef"]), logprobs=[scores(KEY, [*b"ef"])]), 3.0)
    output = target.snapshot(state)
    assert output.text == "a"
    assert output.output_ids == [*b"aBC"]
    assert [entry.token_id for entry in output.output_logprobs] == [*b"aBC"]
    assert output.completion_tokens == 3


def test_stop_string_completed_by_the_last_token_wins_over_length() -> None:
    target = processor()
    state = start(target, stop=("CD",))
    feed(target, b"BC")
    result = target.process(frame([ending(KEY, FinishCode.LENGTH, 68)]), 3.0)
    assert result.finish_keys == []
    assert state.finish_reason is not None
    assert state.finish_reason.to_json() == {"type": "stop", "matched": "CD"}
    assert state.text == "B"


@pytest.mark.parametrize(
    ("code", "token"), [(FinishCode.STOP_TOKEN, EOS), (FinishCode.LENGTH, 33), (FinishCode.ABORTED, -1)]
)
def test_held_text_comes_out_at_the_end(code: FinishCode, token: int) -> None:
    target = processor()
    state = start(target, stop=("?!x",))
    feed(target, b"What?")
    assert state.text == "What"
    target.process(frame([ending(KEY, code, token, token)]), 3.0)
    assert state.text == ("What?!" if token == 33 else "What?")


def test_incomplete_character_at_the_end_is_replaced_once() -> None:
    target = processor()
    state = start(target, stream=True)
    feed(target, "é🙂".encode()[:-1])
    assert state.text == "é"
    target.process(frame([ending(KEY, FinishCode.LENGTH, 0xE4)]), 3.0)
    assert state.text == "é" + ("🙂".encode()[:-1] + b"\xe4").decode(errors="replace")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (FinishCode.WAITING_TIMEOUT, ("Request waiting timeout reached.", 503)),
        (FinishCode.RUNNING_TIMEOUT, ("Request running timeout reached.", 503)),
        (FinishCode.QUEUE_FULL, ("The request queue is full.", 429)),
        (FinishCode.TOO_LONG, ("too long: 9", 400)),
        (FinishCode.ERROR, ("no logits", 500)),
        (FinishCode.ABORTED, ("Abort in waiting queue", None)),
    ],
)
def test_aborts(code: FinishCode, reason: tuple[str, int | None]) -> None:
    target = processor()
    state = start(target)
    messages = {FinishCode.TOO_LONG: {KEY: "too long: 9"}, FinishCode.ERROR: {KEY: "no logits"}}.get(code)
    target.process(frame([ending(KEY, code)], messages=messages), 3.0)
    assert state.finish_reason is not None
    assert state.finish_reason.type == "abort"
    assert (state.finish_reason.message, state.finish_reason.status_code) == reason
    assert ("status_code" in state.finish_reason.to_json()) == (reason[1] is not None)
    assert target.snapshot(state).completion_tokens == 0


def test_prompt_only() -> None:
    target = processor()
    state = start(target, max_new_tokens=0)
    records = [scores(KEY, [65, 66], prompt=True, top=1, extra=2)]
    target.process(frame([ending(KEY, FinishCode.LENGTH)], logprobs=records), 3.0)
    output = target.snapshot(state)
    assert output.finish_reason is not None
    assert output.finish_reason.to_json() == {"type": "length", "length": 0}
    first, second = output.input_logprobs
    assert (first.token_id, first.logprob) == (65, None)
    assert second.logprob == pytest.approx(-0.2)
    assert [token_id for _, token_id in second.top] == [66]
    assert [token_id for _, token_id in second.extra] == [9, 8]
    assert [logprob for logprob, _ in (*second.top, *second.extra)] == pytest.approx([-0.2, -0.2, -1.2])


def test_readers_are_told_only_of_news() -> None:
    target = processor()
    streaming, unary = start(target, 1, stream=True), start(target, 2)
    seen = []
    for byte in "é!".encode():
        seen.append(target.process(frame([*tokens(1, [byte]), *tokens(2, [byte])]), 2.0).changed)
    assert seen == [[], [streaming], [streaming]]
    result = target.process(frame([ending(1, FinishCode.STOP_TOKEN, EOS, EOS), ending(2, FinishCode.LENGTH, 33)]), 3.0)
    assert result.changed == [streaming, unary]


def test_stream_interval_thins_notices() -> None:
    target = processor()
    state = start(target, stream=True, stream_interval=3)
    notices = [bool(target.process(frame(tokens(KEY, [66])), 2.0).changed) for _ in range(8)]
    assert notices == [True, False, False, True, False, False, True, False]
    target.process(frame([ending(KEY, FinishCode.LENGTH, 66)]), 3.0)
    assert state.text == "B" * 9


def test_rows_of_forgotten_sequences_are_ignored() -> None:
    target = processor()
    start(target)
    target.remove(KEY)
    result = target.process(frame(tokens(KEY, [66]), logprobs=[scores(KEY, [66])], retractions=1), 2.0)
    assert (result.changed, result.finish_keys, len(target)) == ([], [], 0)


def test_engine_death_ends_everything_once() -> None:
    target = processor()
    running, ended = start(target, 1, stop=("Bx",)), start(target, 2)
    target.process(frame([*tokens(1, [66]), ending(2, FinishCode.LENGTH, 66)]), 2.0)
    assert target.fail_all("the engine process ended", 503, 3.0) == [running]
    assert running.finish_reason is not None
    assert running.finish_reason.status_code == 503
    assert running.text == "B"
    assert ended.finish_reason is not None
    assert ended.finish_reason.type == "length"


def test_ids_only() -> None:
    target = OutputProcessor(None)
    state = start(target, stream=True)
    assert target.process(frame(tokens(KEY, [66])), 2.0).changed == [state]
    target.process(frame([ending(KEY, FinishCode.STOP_TOKEN, EOS, EOS)]), 3.0)
    output = target.snapshot(state)
    assert (output.text, output.output_ids) == ("", [66, EOS])
    with pytest.raises(RequestError, match="stop needs a tokenizer"):
        start(target, 8, stop=("x",))
