"""Which provider serves which operation on which device: one declarative table, and the choice from it.

Whoever builds the operations of a device asks ``select`` for each operation it needs; a refusal says why each provider
does not serve it. Nothing falls back in silence: torch is a provider of the table like the others, listed where the
wheels have no kernel. Free of torch and of the wheels.
"""

from __future__ import annotations

from sglang_lite.adapters.dispatch import attention, dense, experts, quantized, tokens
from sglang_lite.adapters.dispatch.model import (
    KNOWN_SMS,
    Call,
    Operation,
    Package,
    Provider,
    Refusal,
    SmVersions,
    Target,
    select_from,
    why_not,
)

TABLE: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        *dense.OPERATIONS,
        *attention.OPERATIONS,
        *experts.OPERATIONS,
        *quantized.OPERATIONS,
        *tokens.OPERATIONS,
    )
}
"""Operation by name, in the order of the documentation."""


def select(operation: str, target: Target, dtype: str) -> Provider | Refusal:
    """The provider of an operation.

    Args:
        operation: a name of ``TABLE``, ``family.operation``.
        target: SM version and installed wheels (``adapters.capability.CapabilityRecord.target``).
        dtype: element type of the activations, as torch names it without its prefix: ``bfloat16``.

    Raises:
        KeyError: there is no such operation.
    """
    if operation not in TABLE:
        raise KeyError(f"no operation {operation!r} in the dispatch table; it has {', '.join(TABLE)}")
    return select_from(TABLE[operation], target, dtype)


__all__ = [
    "KNOWN_SMS",
    "TABLE",
    "Call",
    "Operation",
    "Package",
    "Provider",
    "Refusal",
    "SmVersions",
    "Target",
    "select",
    "why_not",
]
