"""The host's operations as the other side of every comparison."""

from __future__ import annotations

from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.adapters.cpu.grammar import CpuGrammar
from sglang_lite.adapters.cpu.sampling import CpuSampling
from sglang_lite.adapters.cpu.speculation import CpuSpeculation
from sglang_lite.adapters.verification.case import Subject


def host_subject() -> Subject:
    """All operations of the host."""
    return Subject(CpuOperations(measure=False), CpuSampling(), CpuGrammar(), CpuSpeculation())
