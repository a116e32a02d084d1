"""The comparison of a device with the host, the device being doubles of the wheels; and that it finds faults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import Operations
from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.adapters.grammar import GrammarOperations
from sglang_lite.adapters.latent import LatentOperations
from sglang_lite.adapters.lora import AdapterOperations
from sglang_lite.adapters.moe import MoEOperations
from sglang_lite.adapters.quantized import QuantizedOperations
from sglang_lite.adapters.recurrent import RecurrentOperations
from sglang_lite.adapters.sampling import SamplingOperations
from sglang_lite.adapters.speculation import SpeculationOperations
from sglang_lite.adapters.verification import FAMILIES, Case, Outcome, Source, Status, Subject, host_subject, verify
from sglang_lite.adapters.verification.dense_cases import dense_cases
from sglang_lite.adapters.verification.report import print_table
from tests.support.kernel_doubles.everything import doubled_subject, installed_everything

PROTOCOLS = (
    Operations,
    LatentOperations,
    AdapterOperations,
    MoEOperations,
    QuantizedOperations,
    RecurrentOperations,
    SamplingOperations,
    GrammarOperations,
    SpeculationOperations,
)
HOST = host_subject()
TREES = {"SpeculationOperations.build_tree", "SpeculationOperations.verify_tree"}
"""What the newer line has no kernels for."""


@pytest.mark.parametrize(
    ("line", "sm", "refused"),
    [
        ("sglang-kernel", 90, TREES),
        ("sgl-kernel", 90, set()),
        ("sglang-kernel", 89, TREES | {"QuantizedOperations.fp8_block_gemm"}),
        ("sglang-kernel", 100, TREES | {"QuantizedOperations.int8_gemm"}),
    ],
)
def test_cuda_operations_over_the_doubles(line: str, sm: int, refused: set[str]) -> None:
    with installed_everything(line):
        outcomes = list(verify(doubled_subject(line, sm), HOST, FAMILIES))
    assert [outcome for outcome in outcomes if outcome.status in (Status.FAIL, Status.ERROR)] == []
    assert {outcome.operation for outcome in outcomes if outcome.status is Status.REFUSED} == refused
    assert all(outcome.microseconds > 0 for outcome in outcomes if outcome.status is Status.PASS)


def test_float16_and_other_seeds() -> None:
    with installed_everything("sglang-kernel"):
        outcomes = list(verify(doubled_subject("sglang-kernel"), HOST, FAMILIES[:2], dtypes=[torch.float16], seeds=[1]))
    assert [outcome for outcome in outcomes if outcome.status is not Status.PASS] == []
    assert {outcome.dtype for outcome in outcomes} == {"float16"}


def test_every_operation_of_the_protocols_is_compared() -> None:
    """A new method of a protocol needs a case: a device that gets it wrong must not pass."""
    source = Source(torch.bfloat16, 0)
    cases = [case for family in FAMILIES for case in family(source)]
    covered = {name for case in cases for name in (case.operation, *case.also)}
    methods = {
        f"{protocol.__name__}.{name}"
        for protocol in PROTOCOLS
        for name, member in vars(protocol).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    assert covered == methods


def test_the_same_seed_makes_the_same_cases() -> None:
    def made(seed: int) -> list[tuple[str, str]]:
        return [(case.operation, case.shape) for family in FAMILIES for case in family(Source(torch.bfloat16, seed))]

    assert made(3) == made(3)
    assert made(3) != made(4)


class Altered:
    """Operations of which one method does something else."""

    def __init__(self, operations: Operations, name: str, method: Callable[..., object]) -> None:
        self._operations = operations
        setattr(self, name, method)

    def __getattr__(self, name: str) -> object:
        return getattr(self._operations, name)


def failing(name: str, method: Callable[..., object]) -> list[Outcome]:
    altered = Altered(HOST.operations, name, method)
    outcomes = verify(Subject(altered), HOST, [dense_cases])  # type: ignore[arg-type]
    return [outcome for outcome in outcomes if outcome.status is not Status.PASS]


def test_wrong_numbers_are_found() -> None:
    def no_epsilon(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return HOST.operations.rms_norm(x, weight, eps) * 1.05

    found = failing("rms_norm", no_epsilon)
    assert {outcome.operation for outcome in found} == {"Operations.rms_norm"}
    assert all(outcome.status is Status.FAIL and outcome.used > 1 and "expected" in outcome.detail for outcome in found)


def test_pages_that_were_not_copied_are_found() -> None:
    assert [outcome.operation for outcome in failing("copy_pages", lambda *_: None)] == ["Operations.copy_pages"]


def test_wrong_shapes_and_numbers_that_are_not_finite_are_found() -> None:
    (short,) = failing("silu_and_mul", lambda gate_up: gate_up)
    assert "shape" in short.detail
    (missing,) = failing("silu_and_mul", lambda gate_up: HOST.operations.silu_and_mul(gate_up) * torch.nan)
    assert missing.detail == "result 0: not finite where the host is"


def test_what_a_kernel_raises_is_shown() -> None:
    def broken(*arguments: object) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    (error,) = failing("embedding", broken)
    assert error.status is Status.ERROR
    assert error.detail == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_the_table() -> None:
    lines: list[str] = []
    good = Outcome("Operations.rms_norm", "[1, 2]", "bfloat16", Status.PASS, 0.5, 0.25, 12.0)
    refused = Outcome("X.y", "[1]", "bfloat16", Status.REFUSED, detail="runs on SM 90")
    assert print_table([good, refused], lines.append)
    assert "25.0%" in lines[1]
    assert "12.0 us  [1, 2]" in lines[1]
    assert "runs on SM 90" in lines[2]
    assert lines[-1] == "1 passed, 0 failed, 1 refused by the dispatch table"
    bad = Outcome("X.y", "[1]", "bfloat16", Status.FAIL, 2.0, 3.0, 1.0, "0 at element 0, expected 2")
    assert not print_table([good, bad], lines.append)
    assert "FAIL: X.y [1] (bfloat16): 0 at element 0, expected 2" in lines
    assert not print_table([refused], lines.append)


def test_a_table_of_nothing_is_no_pass() -> None:
    assert not print_table(iter(()), lambda line: None)


def test_sampling_needs_a_device_that_samples() -> None:
    operations = HOST.operations
    assert not isinstance(operations, CudaOperations)

    def only(source: Source) -> Iterator[Case]:
        from sglang_lite.adapters.verification.sampling_cases import sampling_cases

        yield next(sampling_cases(source))

    (outcome,) = verify(Subject(operations), HOST, [only])
    assert outcome.detail == "ValueError: this device does not sample"
