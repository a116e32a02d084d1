"""Recurrent operations over the wheels' doubles against the host's, for both kernel lines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cpu.recurrent import CpuRecurrent
from sglang_lite.adapters.cuda.recurrent import CudaRecurrent
from sglang_lite.adapters.cuda.wheels import load_wheels
from sglang_lite.adapters.recurrent import RecurrentBatch
from tests.support.kernel_doubles.families import Calls, installed_families

REFERENCE = CpuRecurrent()
BATCHES = {
    "decode": RecurrentBatch(3, [1, 1, 1], [4, 0, 2], [False] * 3),
    "prefill": RecurrentBatch(0, [5, 1, 70], [4, 0, 2], [True, False, True]),
    "mixed": RecurrentBatch(2, [1, 1, 2, 9], [3, 1, 0, 5], [False, False, False, True]),
    "one token": RecurrentBatch(0, [1], [3], [True]),
}


@pytest.fixture(params=["sglang-kernel", "sgl-kernel"])
def calls(request: pytest.FixtureRequest) -> Iterator[Calls]:
    with installed_families(request.param) as made:
        yield made


@pytest.fixture
def ops(calls: Calls) -> CudaRecurrent:
    return CudaRecurrent(load_wheels(), torch.device("cpu"))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_convolution(ops: CudaRecurrent, calls: Calls, name: str, taps: int, strided: bool) -> None:
    batch = BATCHES[name]
    x = random(sum(batch.query_lens), 24).bfloat16()
    weight, state = random(12, taps, seed=1).bfloat16(), random(6, 12, taps - 1, seed=2).bfloat16()
    x = x[:, 6:18] if strided else x[:, 6:18].contiguous()  # part of a wider projection, or all of one
    given, expected_state = x.clone(), state.clone()
    out = ops.causal_conv(x, weight, state, ops.plan(batch))
    expected = REFERENCE.causal_conv(given, weight, expected_state, REFERENCE.plan(batch))
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(state, expected_state)
    assert torch.equal(x, given)
    expected_calls = {"sgl_kernel.causal_conv1d_update": batch.num_decode > 0}
    expected_calls["sgl_kernel.causal_conv1d_fwd"] = len(batch.query_lens) > batch.num_decode
    assert {path: path in calls for path in expected_calls} == expected_calls


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_delta_rule(ops: CudaRecurrent, name: str, per_channel: bool) -> None:
    batch = BATCHES[name]
    tokens = sum(batch.query_lens)
    query, key, value = random(tokens, 2, 8), random(tokens, 2, 8, seed=1), random(tokens, 4, 6, seed=2)
    decay = -random(tokens, 4, 8, seed=3).abs() if per_channel else -random(tokens, 4, seed=3).abs()
    beta, state = random(tokens, 4, seed=4).sigmoid(), random(6, 4, 8, 6, seed=5)
    expected_state = state.clone()
    out = ops.gated_delta(query, key, value, decay, beta, state, ops.plan(batch))
    expected = REFERENCE.gated_delta(query, key, value, decay, beta, expected_state, REFERENCE.plan(batch))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state, expected_state)


def test_what_the_kernels_do_not_take_is_refused(ops: CudaRecurrent) -> None:
    plan = ops.plan(BATCHES["decode"])
    x, state = random(3, 8).bfloat16(), random(6, 8, 4).bfloat16()
    with pytest.raises(OperationInputError, match="2 to 4 taps"):
        ops.causal_conv(x, random(8, 5).bfloat16(), state, plan)
    with pytest.raises(OperationInputError, match=r"the state must be \[rows, 8, 3\]"):
        ops.causal_conv(x, random(8, 4).bfloat16(), state, plan)
    with pytest.raises(OperationInputError, match="float32"):
        ops.causal_conv(x, random(8, 4).bfloat16(), state[..., :3].float(), plan)
    with pytest.raises(TypeError, match="plan"):
        ops.causal_conv(x, random(8, 4).bfloat16(), state[..., :3], REFERENCE.plan(BATCHES["decode"]))
    with pytest.raises(TypeError, match="plan"):
        ops.gated_delta(x, x, x, x, x, x, REFERENCE.plan(BATCHES["decode"]))


def test_indices_are_on_the_device() -> None:
    """A device without memory stands for the accelerator: nothing that a layer uses may be left on the host."""
    with installed_families("sglang-kernel"):
        plan = CudaRecurrent(load_wheels(), torch.device("meta")).plan(BATCHES["mixed"])
    index = plan.blocks(64)
    tensors = [plan.query_starts, plan.decode_slots, plan.prefill_slots, plan.has_state, plan.decode_rows]
    tensors += [plan.prefill_rows, plan.fresh, plan.longest_first, index.places, *index.order]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("rows", [[3, 1, 2, 8, 0], [1, 2, 3, 8, 0], [0, 5, 8, 3, 1]])
def test_the_delta_rule_stays_on_the_device(rows: list[int], per_channel: bool) -> None:
    """On a device that holds shapes alone: a tensor made elsewhere on the way would be refused."""
    device = torch.device("meta")
    with installed_families("sglang-kernel"):
        ops = CudaRecurrent(load_wheels(), device)
    plan = ops.plan(RecurrentBatch(3, [1, 1, 1, 70, 3], rows, [False, False, False, True, False]))
    heads = torch.empty(76, 2, 8, device=device)
    value, beta = torch.empty(76, 4, 6, device=device), torch.empty(76, 4, device=device)
    decay = torch.empty(76, 4, 8, device=device) if per_channel else beta
    state = torch.empty(9, 4, 8, 6, device=device)
    output = ops.gated_delta(heads, heads, value, decay, beta, state, plan)
    assert (output.device, output.shape) == (device, value.shape)
