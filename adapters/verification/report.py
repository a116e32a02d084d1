"""The pass table: one line a case as it ends, then what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from sglang_lite.adapters.verification.run import Outcome, Status

HEADER = f"{'':8} {'operation':40} {'type':10} {'error':>10} {'of limit':>9} {'time':>11}  shape"
_GOOD = (Status.PASS, Status.REFUSED)


def print_table(outcomes: Iterable[Outcome], write: Callable[[str], None] = print) -> bool:
    """Write the table as the cases end; True when none failed and at least one passed.

    Args:
        outcomes: of ``verify``.
        write: takes one line.
    """
    write(HEADER)
    counts: Counter[Status] = Counter()
    bad: list[Outcome] = []
    for outcome in outcomes:
        counts[outcome.status] += 1
        if outcome.status not in _GOOD:
            bad.append(outcome)
        write(_line(outcome))
    for outcome in bad:
        write(f"{outcome.status}: {outcome.operation} {outcome.shape} ({outcome.dtype}): {outcome.detail}")
    write(
        f"{counts[Status.PASS]} passed, {counts[Status.FAIL] + counts[Status.ERROR]} failed, "
        f"{counts[Status.REFUSED]} refused by the dispatch table"
    )
    return not bad and counts[Status.PASS] > 0


def _line(outcome: Outcome) -> str:
    if outcome.status is Status.REFUSED:
        return f"{outcome.status:8} {outcome.operation:40} {outcome.dtype:10} {outcome.detail}"
    return (
        f"{outcome.status:8} {outcome.operation:40} {outcome.dtype:10} {outcome.error:10.2e} {outcome.used:9.1%} "
        f"{outcome.microseconds:8.1f} us  {outcome.shape}"
    )
