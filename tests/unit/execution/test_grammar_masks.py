"""Masks of grammars over logits."""

from __future__ import annotations

import numpy as np
import torch

from sglang_lite.adapters.cpu.grammar import CpuGrammar
from sglang_lite.execution.grammar_masks import ConstrainedStep, GrammarMasks, advance, upload_to_host
from sglang_lite.scheduler.plan import StepOutput
from tests.support.scripted_matcher import ScriptedMatcher

VOCABULARY = 40


def masks() -> GrammarMasks:
    return GrammarMasks(CpuGrammar(), VOCABULARY, upload_to_host)


def test_only_rows_with_a_grammar_are_masked() -> None:
    logits = torch.randn(3, VOCABULARY)
    before = logits.clone()
    suppressed = {0: (3,)}
    assert masks().apply(logits, {2: ScriptedMatcher(33, 5)}, suppressed) is suppressed
    assert torch.equal(logits[:2], before[:2])
    assert logits[2].argmax() == 33
    assert torch.isfinite(logits[2]).sum() == 1


def test_no_grammar_is_no_work() -> None:
    logits = torch.randn(2, VOCABULARY)
    before = logits.clone()
    masks().apply(logits, {}, {})
    assert torch.equal(logits, before)


def test_an_end_that_is_all_that_is_left_is_not_suppressed() -> None:
    logits = torch.zeros(2, VOCABULARY)
    assert masks().apply(logits, {0: ScriptedMatcher(7), 1: ScriptedMatcher(8)}, {0: (7, 39), 1: (7,)}) == {1: (7,)}


def test_matchers_hear_what_was_drawn() -> None:
    followed, refused, ended, failed = (
        ScriptedMatcher(1, 2),
        ScriptedMatcher(1, 2),
        ScriptedMatcher(),
        ScriptedMatcher(1),
    )
    tokens = np.array([1, 9, 5, -1], dtype=np.int32)
    advance({0: followed, 1: refused, 2: ended, 3: failed}, tokens)
    assert followed.left == [2]
    assert tokens.tolist() == [1, -1, 5, -1], "a token against the grammar is none; behind the end all are"
    assert failed.left == [1]


class Once:
    """A launched step whose result may be asked for once."""

    step = 4

    def __init__(self) -> None:
        self.asked = 0

    def result(self) -> StepOutput:
        self.asked += 1
        return StepOutput(4, np.array([1], dtype=np.int32), [])


def test_a_step_tells_its_matchers_once_whoever_asks_first() -> None:
    pending, script = Once(), ScriptedMatcher(1, 1)
    step = ConstrainedStep(pending, {0: script})
    assert step.step == 4
    assert step.result() is step.result()
    assert pending.asked == 1
    assert script.left == [1]
