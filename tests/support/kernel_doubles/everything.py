"""Both wheels with every double there is, for one kernel line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.cuda.subject import subject_of
from sglang_lite.adapters.dispatch import Target
from sglang_lite.adapters.verification import Subject
from tests.support.kernel_doubles import DENSE_DOUBLES, OPERATOR_DOUBLES
from tests.support.kernel_doubles.families import ATTRIBUTES, FAMILY_DOUBLES
from tests.support.kernel_records import record_of
from tests.support.kernel_stubs import Observer, installed_stubs, registered_operators

WORKSPACE_BYTES = 64


@contextmanager
def installed_everything(line: str, observer: Observer | None = None) -> Iterator[None]:
    """Doubles of what the line has; ``observer`` is told of every call."""
    offered = {}
    for path, double in {**FAMILY_DOUBLES, **DENSE_DOUBLES}.items():
        record = record_of(path, line)
        defined = record.aliases.get(path, path)
        if defined in record.functions or defined in record.classes:
            offered[path] = double
    with installed_stubs(line, offered, ATTRIBUTES, observer), registered_operators(line, OPERATOR_DOUBLES):
        yield


def doubled_subject(line: str, sm: int = 90, dtype: torch.dtype = torch.bfloat16) -> Subject:
    """The CUDA operations over the installed doubles, on the host's memory."""
    selection = Selection(Target(sm, line, has_flashinfer=True), enable_pdl=sm >= 90)
    operations = CudaOperations(torch.device("cpu"), selection, dtype=dtype, workspace_bytes=WORKSPACE_BYTES)
    return subject_of(operations, selection)
