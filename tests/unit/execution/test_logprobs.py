"""Log-probabilities: numbers of the chain model, slices of a long prompt, absent tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang_lite.execution import logprobs
from sglang_lite.execution.logprobs import LogprobScorer, score_positions
from sglang_lite.scheduler.plan import LogprobRequest
from tests.support.step_plans import PlanMaker, PlannedSequence

VOCAB = 260


def chain_logits(token: int) -> torch.Tensor:
    """Logits of the chain model after ``token``: successor, ``~``, ``^``."""
    row = torch.zeros(VOCAB)
    row[token + 1], row[126], row[94] = 5.6554, 4.5243, 3.3932
    return row


def test_chain_model_numbers() -> None:
    logits = torch.stack([chain_logits(65), chain_logits(66)])
    scored = score_positions(logits, np.array([66, 0], dtype=np.int32), 3, (94, 126))
    np.testing.assert_allclose(scored.logprobs, [-0.84412, -6.49953], atol=1e-4)
    np.testing.assert_array_equal(scored.top_ids[0], [66, 126, 94])
    np.testing.assert_allclose(scored.top_logprobs[0], [-0.84412, -1.97520, -3.10629], atol=1e-4)
    np.testing.assert_allclose(scored.extra_logprobs[0], [-3.10629, -1.97520], atol=1e-4)
    assert scored.logprobs.dtype == np.float32 and scored.top_ids.dtype == np.int32


def test_absent_token_scores_as_nan() -> None:
    scored = score_positions(chain_logits(65).unsqueeze(0), np.array([-1], dtype=np.int32), 0, ())
    assert np.isnan(scored.logprobs).all()
    assert scored.top_ids.shape == (1, 0) and scored.extra_logprobs.shape == (1, 0)


@pytest.mark.parametrize("slice_bytes", [1, 3 * 4 * VOCAB, 1 << 20])
def test_prompt_positions_come_from_the_token_before(monkeypatch: pytest.MonkeyPatch, slice_bytes: int) -> None:
    """A second chunk of a prompt beside another row: position p is scored by the hidden state of p - 1."""
    monkeypatch.setattr(logprobs, "SLICE_BYTES", slice_bytes)
    maker = PlanMaker(4, 32)
    other, sequence = PlannedSequence(0), PlannedSequence(1)
    maker.plan([], [(other, [10, 11]), (sequence, [65, 66, 67])])
    chunk = [68, 69, 70, 71]
    request = LogprobRequest(1, 9, 4, 7, np.array([69, 70, 5], dtype=np.int32), True, 1, (94,), hidden=True)
    plan = maker.plan([other], [(sequence, chunk)], logprobs=[request])
    hidden = torch.tensor([[20.0], *([float(token)] for token in chunk)])
    scorer = LogprobScorer(lambda rows: torch.stack([chain_logits(int(row)) for row in rows[:, 0]]), VOCAB)
    raw = torch.stack([chain_logits(20), chain_logits(71)])
    (scored,) = scorer.score(plan, hidden, raw, np.array([21, 72], dtype=np.int32))
    np.testing.assert_allclose(scored.logprobs, [-0.84412, -0.84412, -6.49953, -0.84412], atol=1e-4)
    np.testing.assert_array_equal(scored.top_ids[:, 0], [69, 70, 71, 72])
    assert scored.extra_logprobs.shape == (4, 1)
    np.testing.assert_array_equal(scored.hidden, [[68], [69], [70], [71]])
    bare = replace(plan, logprobs=[replace(request, hidden=False)])
    assert scorer.score(bare, hidden, raw, np.array([21, 72], dtype=np.int32))[0].hidden.shape == (4, 0)


def test_nothing_asked_for_gives_no_records() -> None:
    maker = PlanMaker(4, 8)
    plan = maker.plan([], [(PlannedSequence(0), [1, 2])])
    scorer = LogprobScorer(lambda rows: rows, VOCAB)
    assert scorer.score(plan, torch.zeros(2, 1), None, np.array([1], dtype=np.int32)) == []
    assert scorer.keep_raw(plan, torch.zeros(1, VOCAB)) is None
    empty = LogprobRequest(0, 1, 1, 1, np.empty(0, dtype=np.int32), False, 2)
    plan = replace(plan, logprobs=[empty])
    scorer = LogprobScorer(lambda rows: torch.zeros(len(rows), VOCAB), VOCAB)
    (scored,) = scorer.score(plan, torch.zeros(2, 1), None, np.array([1], dtype=np.int32))
    assert scored.logprobs.shape == (0,) and scored.top_ids.shape == (0, 2)
