"""A grammar behind reasoning: what is allowed when, and taking tokens back over the border."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.grammar.thinking import ThinkingMatcher, behind_thinking
from sglang_lite.types import ThinkingTokens
from tests.support.scripted_matcher import ScriptedMatcher

OPEN, CLOSE, END = 40, 41, 2
SCRIPT = (5, 6, 7, END)


def allowed(matcher: ThinkingMatcher) -> set[int]:
    bits = np.zeros(2, dtype=np.int32)
    matcher.fill(bits)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def test_without_reasoning_it_is_the_matcher_itself() -> None:
    matcher = ScriptedMatcher(*SCRIPT)
    assert behind_thinking(matcher, None) is matcher


def test_an_output_that_begins_inside_is_free_until_the_end_marker() -> None:
    matcher = ThinkingMatcher(ScriptedMatcher(*SCRIPT), ThinkingTokens(-1, CLOSE))
    for token in (9, 5, OPEN, END, 9):
        assert len(allowed(matcher)) == 64 and matcher.forced() == []
        assert matcher.accept(token)
    assert matcher.accept(CLOSE)
    assert matcher.forced() == list(SCRIPT)
    for token in SCRIPT:
        assert allowed(matcher) == {token}
        assert not matcher.accept(CLOSE)
        assert matcher.accept(token)
    assert matcher.is_terminated


def test_the_first_token_says_whether_there_is_reasoning() -> None:
    matcher = ThinkingMatcher(ScriptedMatcher(*SCRIPT), ThinkingTokens(OPEN, CLOSE))
    assert allowed(matcher) == {OPEN, SCRIPT[0]}
    assert not matcher.accept(9)
    assert matcher.accept(SCRIPT[0])
    assert allowed(matcher) == {SCRIPT[1]} and not matcher.accept(OPEN)
    matcher.rollback(1)
    assert allowed(matcher) == {OPEN, SCRIPT[0]}
    assert matcher.accept(OPEN)
    assert len(allowed(matcher)) == 64


@given(st.lists(st.sampled_from([9, 5, OPEN, END]), max_size=6), st.integers(0, 4), st.booleans(), st.data())
def test_taking_back_restores_what_was_allowed(
    thought: list[int], matched: int, inside: bool, data: st.DataObject
) -> None:
    matcher = ThinkingMatcher(ScriptedMatcher(*SCRIPT), ThinkingTokens(-1 if inside else OPEN, CLOSE))
    tokens = [*([] if inside else [OPEN]), *thought, CLOSE, *SCRIPT[:matched]]
    states = []
    for token in tokens:
        states.append(allowed(matcher))
        assert matcher.accept(token)
    states.append(allowed(matcher))
    count = data.draw(st.integers(0, len(tokens)))
    matcher.rollback(count)
    assert allowed(matcher) == states[len(tokens) - count]
    for token in tokens[len(tokens) - count :]:
        assert matcher.accept(token)
    assert allowed(matcher) == states[-1]
