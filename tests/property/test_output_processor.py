"""Whatever way tokens arrive in frames, a sequence ends with the same text, ids, log-probabilities and reason."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.frontend.output import OutputProcessor, SequenceState
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.types import FinishCode, OutputColumns, SamplingParams
from tests.unit.frontend.frames import ending, frame, scores, tokens
from tests.unit.frontend.vocabularies import vocabulary

VOCABULARIES = ("chain", "byte level", "byte fallback, stripped", "metaspace")
TEXTS = ("ab ba世界🙂 ab", "1\n2\n3", "a b c d", "The fox, again. 삼겹살")
STOPS = st.lists(st.sampled_from(["b c", "世", "🙂 a", "ab", "\n3x", "fox", "3\n", ". 삼"]), max_size=3).map(tuple)


def expected(text_of: list[str], stops: tuple[str, ...]) -> tuple[str, int, str | None]:
    """(text, tokens, matched) from the one-shot texts of the first 1, 2, ... tokens."""
    full = text_of[-1] if text_of else ""
    for end in range(1, len(full) + 1):
        ending_here = [stop for stop in stops if full[:end].endswith(stop)]
        if ending_here:
            stop = max(ending_here, key=len)
            count = next(n for n, text in enumerate(text_of, 1) if stable(text, full) >= end)
            return full[: end - len(stop)], count, stop
    return full, len(text_of), None


def stable(text: str, full: str) -> int:
    """How much of a text so far the whole text agrees with."""
    return next((i for i, (a, b) in enumerate(zip(text, full, strict=False)) if a != b), min(len(text), len(full)))


def in_frames(token_ids: list[int], cuts: list[int]) -> list[OutputColumns]:
    """Frames of several tokens, with a neighbour's rows between them; the last one carries the end."""
    frames = []
    for start, end in zip([0, *cuts], [*cuts, len(token_ids)], strict=True):
        part = token_ids[start:end]
        rows = tokens(1, part)
        if end == len(token_ids) and part:
            rows[-1] = ending(1, FinishCode.LENGTH, part[-1])
        frames.append(frame([*tokens(2, [65]), *rows], logprobs=[scores(1, part)] if part else []))
    return frames


def run(name: str | Tokenizer, frames: list[OutputColumns], stops: tuple[str, ...]) -> tuple[SequenceState, list[str]]:
    processor = OutputProcessor(vocabulary(name) if isinstance(name, str) else name)
    sampling = SamplingParams(stop=stops)
    state = processor.add(1, GenerateRequest(request_id="a", text="x", sampling=sampling, stream=True), 1, 0.0)
    processor.add(2, GenerateRequest(request_id="b", text="x"), 1, 0.0)
    seen = [""]
    finished_keys: list[int] = []
    for one in frames:
        result = processor.process(one, 1.0)
        finished_keys += result.finish_keys
        if state in result.changed:
            seen.append(processor.snapshot(state).text)
    assert finished_keys in ([], [1])
    return state, seen


@settings(max_examples=200, deadline=None)
@given(data=st.data(), name=st.sampled_from(VOCABULARIES), text=st.sampled_from(TEXTS), stops=STOPS)
def test_every_cut_into_frames(data: st.DataObject, name: str, text: str, stops: tuple[str, ...]) -> None:
    tokenizer = vocabulary(name)
    token_ids = tokenizer.encode(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids) - 1), max_size=len(token_ids))))
    state, seen = run(name, in_frames(token_ids, cuts), stops)

    shown = [tokenizer.decode(token_ids[:count]) for count in range(1, len(token_ids) + 1)]
    final, count, matched = expected(shown, stops)
    assert state.text == seen[-1] == final
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))
    assert state.finish_reason is not None
    assert state.finish_reason.matched == matched
    assert state.finish_reason.type == ("length" if matched is None else "stop")
    # A byte run is only read when it ends, so there the end may be seen a few tokens later.
    assert len(state.output_ids) == count or (name == "byte fallback, stripped" and len(state.output_ids) > count)
    assert [entry.token_id for entry in state.output_logprobs] == state.output_ids


@settings(max_examples=100, deadline=None)
@given(data=st.data(), stops=STOPS)
def test_multi_token_steps_equal_single_token_steps(data: st.DataObject, stops: tuple[str, ...]) -> None:
    """Everything about a stopped sequence, not only its text, is independent of the frames."""
    token_ids = data.draw(st.lists(st.integers(0, 257) | st.sampled_from(list(b"ab c")), min_size=1, max_size=30))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids) - 1), max_size=10)))
    one, _ = run("chain", in_frames(token_ids, list(range(1, len(token_ids)))), stops)
    other, _ = run("chain", in_frames(token_ids, cuts), stops)
    assert (one.text, one.output_ids, one.finish_reason) == (other.text, other.output_ids, other.finish_reason)
    assert [entry.token_id for entry in one.output_logprobs] == one.output_ids
    assert [entry.token_id for entry in other.output_logprobs] == other.output_ids


@pytest.mark.demo_model
def test_b02_all_cuts_of_200_lists_over_a_real_vocabulary(demo_model: Path) -> None:
    """Six tokens have 32 ways to come in frames; a third of the lists are characters of several tokens, cut short."""
    tokenizer = Tokenizer.load(demo_model)
    random_ids = random.Random(2)
    several = tokenizer.encode("삼겹살 👩‍👩‍👧‍👦 世a界 Ünïcødé")
    for number in range(200):
        start = random_ids.randrange(len(several) - 6)
        anywhere = [random_ids.randrange(tokenizer.vocab_size) for _ in range(6)]
        token_ids = several[start : start + 6] if number % 3 == 0 else anywhere
        whole = tokenizer.decode(token_ids)
        for count in range(6):
            for cuts in itertools.combinations(range(1, 6), count):
                state, seen = run(tokenizer, in_frames(token_ids, list(cuts)), ())
                assert state.text == seen[-1] == whole
                assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))
