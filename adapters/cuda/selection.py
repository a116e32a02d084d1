"""What the dispatch table chooses for one device, for the adapters that have more than one way to compute something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.dispatch import TABLE, Provider, Refusal, Target, select, why_not


@dataclass(frozen=True, slots=True)
class Selection:
    """The choices for one device.

    Attributes:
        target: SM version and installed wheels.
        enable_pdl: programmatic dependent launch, passed to every kernel that takes it.
    """

    target: Target
    enable_pdl: bool = False

    def provider(self, operation: str, dtype: torch.dtype) -> Provider:
        """The provider of an operation of the dispatch table.

        Raises:
            OperationInputError: nothing serves it here; says why.
        """
        found = select(operation, self.target, dtype_name(dtype))
        if isinstance(found, Refusal):
            raise OperationInputError(f"{operation} on SM {self.target.sm} with {dtype_name(dtype)}: {found.reason}")
        return found

    def providers(self, operation: str, dtype: torch.dtype) -> Iterator[Provider]:
        """All that serve an operation here, the preferred one first, for a choice by shapes."""
        name = dtype_name(dtype)
        return (entry for entry in TABLE[operation].providers if why_not(entry, self.target, name) is None)

    def refusal(self, operation: str, dtype: torch.dtype) -> str | None:
        """None when a kernel or torch serves the operation here, else why not."""
        found = select(operation, self.target, dtype_name(dtype))
        return found.reason if isinstance(found, Refusal) else None


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16``, as the dispatch table names it."""
    return str(dtype).removeprefix("torch.")


def is_capturing() -> bool:
    """Whether the current stream records a graph, so that nothing may wait for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
