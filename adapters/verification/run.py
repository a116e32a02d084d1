"""Run the cases on a device and on the host and compare."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from sglang_lite.adapters.verification.case import Call, Case, Source, Subject, Tensors

_TIMED_CALLS = 5
_HALF = (torch.float16, torch.bfloat16)


class Status(StrEnum):
    """How a case ended."""

    PASS = "pass"
    FAIL = "FAIL"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the pass table.

    Attributes:
        operation, shape: of the case.
        dtype: of its activations.
        status: how it ended.
        error: largest difference from the host, over all results.
        used: the largest part of its allowance that a difference used up, 1 at the limit.
        microseconds: median of the device's calls; 0 where none was timed.
        detail: what went wrong.
    """

    operation: str
    shape: str
    dtype: str
    status: Status
    error: float = 0.0
    used: float = 0.0
    microseconds: float = 0.0
    detail: str = ""


def verify(
    device: Subject,
    host: Subject,
    families: Iterable[Callable[[Source], Iterator[Case]]],
    *,
    dtypes: Iterable[torch.dtype] = (torch.bfloat16,),
    seeds: Iterable[int] = (0,),
) -> Iterator[Outcome]:
    """Compare every case of the families, as they come.

    Args:
        device: what is tested.
        host: what it is compared with, in float32.
        families: makers of cases.
        dtypes: of activations.
        seeds: each makes other shapes and numbers.
    """
    for dtype in dtypes:
        for seed in seeds:
            for family in families:
                for case in family(Source(dtype, seed)):
                    yield compare(case, device, host, dtype)


def compare(case: Case, device: Subject, host: Subject, dtype: torch.dtype) -> Outcome:
    """One case on both sides."""
    name = str(dtype).removeprefix("torch.")
    expected = (case.expected or case.call)(host, _on_host(case.inputs))
    try:
        results = case.call(device, _on_device(case.inputs, device))
        microseconds = _time(case.call, case.inputs, device)
    except Exception as error:  # whatever a kernel raises is what this table is there to show
        return Outcome(case.operation, case.shape, name, Status.ERROR, detail=f"{type(error).__name__}: {error}")
    if len(results) != len(expected):
        detail = f"{len(results)} results, expected {len(expected)}"
        return Outcome(case.operation, case.shape, name, Status.ERROR, detail=detail)
    largest, used, detail = 0.0, 0.0, ""
    for index, (result, reference) in enumerate(zip(results, expected, strict=True)):
        problem, difference, share = _difference(result.cpu(), reference, case)
        largest, used = max(largest, difference), max(used, share)
        detail = detail or (f"result {index}: {problem}" if problem else "")
    status = Status.FAIL if detail else Status.PASS
    return Outcome(case.operation, case.shape, name, status, largest, used, microseconds, detail)


def _on_host(inputs: Tensors) -> Tensors:
    return {name: tensor.float() if tensor.dtype in _HALF else tensor.clone() for name, tensor in inputs.items()}


def _on_device(inputs: Tensors, device: Subject) -> Tensors:
    return {name: tensor.to(device.operations.device, copy=True) for name, tensor in inputs.items()}


def _difference(result: Tensor, reference: Tensor, case: Case) -> tuple[str, float, float]:
    """(problem or empty, largest difference, largest share of what is allowed)."""
    if result.shape != reference.shape:
        return f"shape {list(result.shape)}, expected {list(reference.shape)}", 0.0, 0.0
    found, wanted = result.double(), reference.double()
    if not bool(found.isfinite().eq(wanted.isfinite()).all()):
        return "not finite where the host is", float("inf"), float("inf")
    gap = (found - wanted).abs().nan_to_num()
    if gap.numel() == 0:
        return "", 0.0, 0.0
    allowed = case.tolerance.absolute + case.tolerance.relative * wanted.abs().nan_to_num()
    share = torch.where(gap == 0, 0.0, gap / allowed)
    largest = int(share.argmax())
    worst = float(share.flatten()[largest])
    if worst <= 1:
        return "", float(gap.max()), worst
    got, want = float(found.flatten()[largest]), float(wanted.flatten()[largest])
    return f"{got:.6g} at element {largest}, expected {want:.6g}", float(gap.max()), worst


def _time(call: Call, inputs: Tensors, device: Subject) -> float:
    """Median microseconds of a call, work on the device included, copies of the inputs not."""
    seconds = []
    for _ in range(_TIMED_CALLS):
        given = _on_device(inputs, device)
        _wait(device)
        started = time.perf_counter()
        call(device, given)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e6


def _wait(device: Subject) -> None:
    if device.operations.device.type == "cuda":
        torch.cuda.synchronize(device.operations.device)
