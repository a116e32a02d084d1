"""What the CUDA adapters call, seen by the stand-ins of the wheels, is what the dispatch table says they call."""

from __future__ import annotations

import inspect
from collections import defaultdict

import pytest

from sglang_lite.adapters.dispatch import TABLE
from sglang_lite.adapters.verification import FAMILIES, Status, host_subject, verify
from tests.support.kernel_doubles.everything import doubled_subject, installed_everything
from tests.support.kernel_records import record_of

Calls = dict[str, set[str]]


def table_calls(line: str) -> Calls:
    """Defining path -> arguments, over all providers of a line."""
    found: Calls = defaultdict(set)
    for operation in TABLE.values():
        for provider in operation.providers:
            for call in provider.calls:
                if line in provider.lines and not call.path.startswith("torch.ops."):
                    found[defining_path(call.path, line)] |= set(call.arguments)
    return found


def defining_path(path: str, line: str) -> str:
    record = record_of(path, line)
    owner, _, method = path.rpartition(".")
    owner = record.aliases.get(owner, owner)
    return f"{owner}.{method}" if owner in record.classes else record.defining_path(path)


@pytest.mark.parametrize(
    ("line", "sm"),
    [("sglang-kernel", 90), ("sglang-kernel", 100), ("sglang-kernel", 80), ("sgl-kernel", 90), ("sgl-kernel", 120)],
)
def test_adapters_call_what_the_table_says(line: str, sm: int) -> None:
    seen: Calls = defaultdict(set)

    def observe(path: str, bound: inspect.BoundArguments) -> None:
        # Positions behind *args belong to a kernel variant and have no names in the signature.
        names = {name for name in bound.arguments if name not in ("args", "kwargs")}
        seen[path] |= names | set(bound.arguments.get("kwargs", ()))

    with installed_everything(line, observe):
        outcomes = list(verify(doubled_subject(line, sm), host_subject(), FAMILIES))
    assert [outcome for outcome in outcomes if outcome.status in (Status.FAIL, Status.ERROR)] == []
    expected = table_calls(line)
    assert len(seen) > 15
    assert {path: names - expected.get(path, set()) for path, names in seen.items() if names - expected[path]} == {}
