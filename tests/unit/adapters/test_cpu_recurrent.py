"""The recurrent operations on the host processor equal a loop over tokens, however a sequence is cut into steps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cpu import recurrent as cpu_recurrent
from sglang_lite.adapters.cpu.recurrent import CpuRecurrent
from sglang_lite.adapters.recurrent import RecurrentBatch, RecurrentOperations
from tests.support.recurrent_reference import ReferenceRecurrent

NUM_ROWS, KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE, CHANNELS, TAPS = 9, 2, 4, 8, 6, 10, 4

each_decay = pytest.mark.parametrize("per_channel", [False, True], ids=["token_decay", "channel_decay"])


@dataclass(frozen=True, slots=True)
class Inputs:
    """Random inputs of T tokens; ``strength`` scales the decay."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor

    @classmethod
    def random(cls, num_tokens: int, *, per_channel: bool, strength: float = 1.0, seed: int = 0) -> Inputs:
        torch.manual_seed(seed)
        shape = (num_tokens, VALUE_HEADS, KEY_SIZE) if per_channel else (num_tokens, VALUE_HEADS)
        return cls(
            torch.randn(num_tokens, KEY_HEADS, KEY_SIZE),
            torch.randn(num_tokens, KEY_HEADS, KEY_SIZE) + 0.5,  # keys that overlap, so that corrections matter
            torch.randn(num_tokens, VALUE_HEADS, VALUE_SIZE),
            -strength * torch.rand(shape),
            torch.rand(num_tokens, VALUE_HEADS),
        )

    def run(
        self, ops: RecurrentOperations, state: Tensor, batch: RecurrentBatch, tokens: slice = slice(None)
    ) -> Tensor:
        columns = [x[tokens] for x in (self.query, self.key, self.value, self.log_decay, self.beta)]
        return ops.gated_delta(*columns, state, ops.plan(batch))


def random_state() -> Tensor:
    return torch.randn(NUM_ROWS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE)


MIXED = RecurrentBatch(3, [1, 1, 1, 5, 70, 130, 1, 64], [4, 5, 6, 8, 0, 2, 3, 7], [False] * 5 + [True, True, False])


@each_decay
@pytest.mark.parametrize("strength", [0.05, 1.0, 40.0])
def test_a_mixed_step_equals_the_recurrence(per_channel: bool, strength: float) -> None:
    inputs = Inputs.random(sum(MIXED.query_lens), per_channel=per_channel, strength=strength)
    state, expected_state = random_state(), torch.empty(0)
    expected_state = state.clone()
    expected = inputs.run(ReferenceRecurrent(), expected_state, MIXED)
    actual = inputs.run(CpuRecurrent(), state, MIXED)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state, expected_state, atol=2e-5, rtol=1e-4)
    assert torch.equal(state[1], expected_state[1])  # a row outside the step is not touched


@each_decay
def test_cuts_do_not_matter(per_channel: bool) -> None:
    num_tokens, row = 150, 3
    inputs = Inputs.random(num_tokens, per_channel=per_channel, strength=0.2)
    whole_state, state = random_state(), random_state()
    whole = inputs.run(CpuRecurrent(), whole_state, RecurrentBatch(0, [num_tokens], [row], [True]))
    pieces = []
    for start, stop in ((0, 1), (1, 2), (2, 67), (67, 68), (68, 131), (131, 150)):
        decode = stop - start == 1 and start == 67
        batch = RecurrentBatch(int(decode), [stop - start], [row], [start == 0])
        pieces.append(inputs.run(CpuRecurrent(), state, batch, slice(start, stop)))
    torch.testing.assert_close(torch.cat(pieces), whole, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state[row], whole_state[row], atol=2e-5, rtol=1e-4)


@each_decay
def test_a_fresh_row_reads_nothing_of_what_was_there(per_channel: bool) -> None:
    inputs = Inputs.random(7, per_channel=per_channel)
    state = torch.full((NUM_ROWS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE), float("nan"))
    tails = torch.full((NUM_ROWS, CHANNELS, TAPS - 1), float("nan"))
    batch = RecurrentBatch(0, [5, 2], [1, 7], [True, True])
    assert inputs.run(CpuRecurrent(), state, batch).isfinite().all()
    ops = CpuRecurrent()
    assert (
        ops.causal_conv(torch.randn(7, CHANNELS), torch.randn(CHANNELS, TAPS), tails, ops.plan(batch)).isfinite().all()
    )
    assert state[[1, 7]].isfinite().all() and tails[[1, 7]].isfinite().all()
    assert state[[0, 2]].isnan().all() and tails[[0, 2]].isnan().all()


@each_decay
def test_long_chunks_in_groups_give_the_same(monkeypatch: pytest.MonkeyPatch, per_channel: bool) -> None:
    inputs = Inputs.random(sum(MIXED.query_lens), per_channel=per_channel)
    state = random_state()
    grouped_state = state.clone()
    whole = inputs.run(CpuRecurrent(), state, MIXED)
    monkeypatch.setattr(cpu_recurrent, "_SOLVED_ELEMENTS", 1)
    grouped = inputs.run(CpuRecurrent(), grouped_state, MIXED)
    torch.testing.assert_close(grouped, whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grouped_state, state, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "rows",
    [[2, 3, 4], [4, 2, 3], [3, 0, 2], [0, 8, 4]],
    ids=["consecutive", "permuted", "a row between", "scattered"],
)
def test_decode_rows_anywhere_in_the_pool(rows: list[int]) -> None:
    inputs = Inputs.random(3, per_channel=False)
    state = random_state()
    expected_state = state.clone()
    batch = RecurrentBatch(3, [1, 1, 1], rows, [False] * 3)
    expected = inputs.run(ReferenceRecurrent(), expected_state, batch)
    torch.testing.assert_close(inputs.run(CpuRecurrent(), state, batch), expected)
    torch.testing.assert_close(state, expected_state)
    others = [row for row in range(NUM_ROWS) if row not in rows]
    assert torch.equal(state[others], expected_state[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taps", [2, 4])
def test_convolution_of_a_mixed_step_equals_the_recurrence(dtype: torch.dtype, taps: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(sum(MIXED.query_lens), CHANNELS).to(dtype)
    weight = torch.randn(CHANNELS, taps).to(dtype)
    state = torch.randn(NUM_ROWS, CHANNELS, taps - 1).to(dtype)
    expected_state = state.clone()
    cpu, reference = CpuRecurrent(), ReferenceRecurrent()
    expected = reference.causal_conv(x, weight, expected_state, reference.plan(MIXED))
    actual = cpu.causal_conv(x, weight, state, cpu.plan(MIXED))
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)
    assert torch.equal(state, expected_state)


def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    ops = CpuRecurrent()
    with pytest.raises(OperationInputError, match="twice"):
        ops.plan(RecurrentBatch(2, [1, 1], [3, 3], [False, False]))
    with pytest.raises(OperationInputError, match="as many"):
        ops.plan(RecurrentBatch(0, [1, 1], [3], [True]))
    with pytest.raises(OperationInputError, match="continues"):
        ops.plan(RecurrentBatch(1, [1], [3], [True]))
    plan = ops.plan(RecurrentBatch(0, [5], [1], [True]))
    with pytest.raises(OperationInputError, match="4 tokens came for a plan of 5"):
        ops.causal_conv(torch.randn(4, 3), torch.randn(3, 4), torch.zeros(2, 3, 3), plan)
    with pytest.raises(OperationInputError, match="channels"):
        ops.causal_conv(torch.randn(5, 3), torch.randn(3, 4), torch.zeros(2, 3, 4), plan)
    inputs = Inputs.random(5, per_channel=False)
    with pytest.raises(OperationInputError, match="does not fit"):
        inputs.run(ops, torch.zeros(2, VALUE_HEADS, VALUE_SIZE, KEY_SIZE), RecurrentBatch(0, [5], [1], [True]))
