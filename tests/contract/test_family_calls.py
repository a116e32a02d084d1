"""Experts, quantized products, recurrent layers, grammars and speculation call the wheels as the dispatch table says.

The stand-ins bind every call against the recorded signature; here the names of the arguments are held against the
table too, which is what the documentation is made from.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.cpu.moe import CpuMoE
from sglang_lite.adapters.cpu.quantized import CpuQuantized
from sglang_lite.adapters.cuda.grammar import CudaGrammar
from sglang_lite.adapters.cuda.moe import CudaMoE
from sglang_lite.adapters.cuda.quantized import CudaQuantized
from sglang_lite.adapters.cuda.recurrent import CudaRecurrent
from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.cuda.speculation import CudaSpeculation
from sglang_lite.adapters.cuda.wheels import load_wheels
from sglang_lite.adapters.dispatch import TABLE, Target
from sglang_lite.adapters.moe import ActivationKind, ExpertActivation, GroupScore, Routing, Scoring
from sglang_lite.adapters.quantized import AwqWeight, Fp8Weight, GptqWeight, Int8Weight, QuantizedWeight
from sglang_lite.adapters.recurrent import RecurrentBatch
from sglang_lite.adapters.speculation import ChainDraft, TreeSelection
from tests.support.kernel_doubles.families import FAMILY_DOUBLES, Calls, installed_families

HALF = torch.bfloat16
SWIGLU = ExpertActivation(ActivationKind.CLAMPED_SWIGLU)
NEW, OLD = "sglang-kernel", "sgl-kernel"


def selection(line: str, sm: int, *, has_flashinfer: bool = True) -> Selection:
    return Selection(Target(sm, line, has_flashinfer))


def experts(line: str) -> None:
    ops = CudaMoE(load_wheels(), selection(line, 90))
    logits, bias = torch.randn(3, 8), torch.zeros(8)
    ids, weights = ops.route(logits, Routing(Scoring.SOFTMAX, 2))
    ops.route(logits, Routing(Scoring.SIGMOID, 2), bias)
    grouped = Routing(Scoring.SIGMOID, 2, True, 2, 1, GroupScore.TOP_2_SUM)
    ops.route(logits, grouped, bias)
    CudaMoE(load_wheels(), selection(line, 90, has_flashinfer=False)).route(logits, grouped, bias)
    ops.align(ids, 8, 4)
    w13, w2 = torch.randn(8, 16, 8).to(HALF), torch.randn(8, 8, 8).to(HALF)
    b13, b2 = torch.randn(8, 16).to(HALF), torch.randn(8, 8).to(HALF)
    packed = ops.pack_experts(w13, w2, activation=SWIGLU, w13_bias=b13, w2_bias=b2)
    packed(torch.randn(3, 8).to(HALF), ids, weights)


def blocks(*shape: int) -> Fp8Weight:
    scale = torch.ones(*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    return Fp8Weight(torch.randn(*shape).to(torch.float8_e4m3fn), scale, (128, 128))


def words(*shape: int) -> Tensor:
    return torch.randint(0, 2**30, shape).int()


def quantized(line: str) -> None:
    reference, x = CpuQuantized(), torch.randn(3, 128).to(HALF)
    rows = reference.quantize_fp8_token(torch.randn(16, 128))
    weights: list[tuple[int, bool, torch.dtype, QuantizedWeight]] = [
        (90, True, HALF, Fp8Weight(*rows)),
        (90, True, HALF, Fp8Weight(*rows, input_scale=torch.ones(()))),
        (90, True, HALF, Int8Weight(*reference.quantize_int8_token(torch.randn(16, 128)))),
        (90, True, HALF, blocks(128, 128)),
        (100, True, HALF, blocks(128, 128)),
    ]
    if line == OLD:
        awq = AwqWeight(words(128, 2), words(2, 2), torch.ones(2, 16))
        gptq = GptqWeight(words(16, 16), words(2, 2), torch.ones(2, 16))
        weights += [(90, False, HALF, blocks(128, 128)), (90, True, HALF, awq), (90, True, torch.float16, gptq)]
    for sm, has_flashinfer, dtype, weight in weights:
        ops = CudaQuantized(load_wheels(), selection(line, sm, has_flashinfer=has_flashinfer), dtype)
        ops.pack_linear(weight, None)(x.to(dtype))
    ops = CudaQuantized(load_wheels(), selection(line, 90), HALF)
    ids, pair_weights = CpuMoE().route(torch.randn(3, 4), Routing(Scoring.SOFTMAX, 2))
    ops.pack_experts(blocks(4, 256, 128), blocks(4, 128, 128))(x, ids, pair_weights)


def recurrent(line: str) -> None:
    ops = CudaRecurrent(load_wheels(), torch.device("cpu"))
    plan = ops.plan(RecurrentBatch(1, [1, 3], [0, 1], [False, True]))
    ops.causal_conv(torch.randn(4, 8).to(HALF), torch.randn(8, 4).to(HALF), torch.randn(2, 8, 3).to(HALF), plan)


def grammar(line: str) -> None:
    CudaGrammar(load_wheels()).apply_bitmask(torch.randn(2, 32), words(2, 1), torch.zeros(1, dtype=torch.int32))


def speculation(line: str) -> None:
    ops = CudaSpeculation(load_wheels(), selection(line, 90))
    probabilities = torch.full((1, 3, 4), 0.25)
    ops.verify_chain(ChainDraft(torch.zeros(1, 2).int(), probabilities[:, :2], probabilities), seed=1, offset=0)
    if line == OLD:
        made = ops.build_tree(TreeSelection(torch.tensor([[-1]]), torch.tensor([[0, 1]]), 2, 1), torch.tensor([5]))
        tokens = torch.zeros(1, 3, dtype=torch.int64)
        ops.verify_tree(made, tokens, tokens, 2)


FAMILIES: list[Callable[[str], None]] = [experts, quantized, recurrent, grammar, speculation]


def run(line: str) -> Calls:
    with installed_families(line) as calls:
        for family in FAMILIES:
            family(line)
    return calls


@pytest.fixture(scope="module", params=[NEW, OLD])
def made(request: pytest.FixtureRequest) -> Calls:
    torch.manual_seed(0)
    return run(request.param)


def stated() -> dict[str, list[frozenset[str]]]:
    table: dict[str, list[frozenset[str]]] = {}
    for operation in TABLE.values():
        for provider in operation.providers:
            for call in provider.calls:
                table.setdefault(call.path, []).append(frozenset(call.arguments))
    return table


def test_every_call_passes_what_the_table_says(made: Calls) -> None:
    table = stated()
    unknown = {
        path: sorted(arguments)
        for path, calls in made.items()
        for arguments in calls
        if not any(arguments <= allowed for allowed in table.get(path, []))
    }
    assert not unknown


def test_every_argument_of_the_table_is_passed(made: Calls) -> None:
    table = stated()
    never = {path: sorted(max(table[path], key=len) - frozenset().union(*calls)) for path, calls in made.items()}
    assert {path: names for path, names in never.items() if names} == {}


def test_every_double_was_called() -> None:
    called = set(run(NEW)) | set(run(OLD))
    assert set(FAMILY_DOUBLES) == called
