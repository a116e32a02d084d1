"""The operations of a CUDA device as the comparison with the host takes them."""

from __future__ import annotations

import torch

from sglang_lite.adapters.capability import capability_record
from sglang_lite.adapters.cuda.grammar import CudaGrammar
from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.cuda.speculation import CudaSpeculation
from sglang_lite.adapters.cuda.wheels import load_wheels
from sglang_lite.adapters.device_facts import DeviceFacts
from sglang_lite.adapters.kernel_lines import InstalledKernels
from sglang_lite.adapters.verification import Subject

_PDL_SINCE = 90
"""SM version from which kernels may start before the one ahead has ended."""


def cuda_subject(facts: DeviceFacts, kernels: InstalledKernels, dtype: torch.dtype) -> Subject:
    """All operations of one device, for activations of ``dtype``; imports the wheels.

    Raises:
        StartupError: a wheel cannot be imported.
        OperationInputError: nothing serves a dense operation there.
    """
    target = capability_record(facts, kernels).target
    selection = Selection(target, enable_pdl=target.sm >= _PDL_SINCE)
    return subject_of(CudaOperations(torch.device("cuda", facts.ordinal), selection, dtype=dtype), selection)


def subject_of(operations: CudaOperations, selection: Selection) -> Subject:
    """Everything beside the operations that models are made of, for the same device."""
    wheels = load_wheels()
    return Subject(
        operations,
        operations.sampling,
        CudaGrammar(wheels),
        CudaSpeculation(wheels, selection),
        selection.target,
    )
