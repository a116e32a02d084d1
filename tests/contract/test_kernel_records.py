"""The pins of the kernel wheels, the records of what they offer, and the calls of the dispatch table agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from sglang_lite.adapters.dispatch import TABLE, Call
from sglang_lite.adapters.kernel_lines import FLASHINFER, FLASHINFER_VERSION, LINES, KernelLine
from tests.support.kernel_records import ContractError, load_record, operator_parameters, record_of

ROOT = Path(__file__).parents[2]

CALLS = [
    pytest.param(line, call, id=f"{line}-{call.path}-{operation.name}")
    for operation in TABLE.values()
    for provider in operation.providers
    for line in provider.lines
    for call in provider.calls
]


def pins(extra: str) -> dict[str, str]:
    """Distribution -> version of the exact pins of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(requirement.split("==") for requirement in project["optional-dependencies"][extra])


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.extra)
def test_pins_are_the_versions_of_the_records(line: KernelLine) -> None:
    for record in (load_record(line.distribution), load_record(FLASHINFER)):
        assert pins(line.extra)[record.distribution] == record.version, (
            "a pin moved without a new record: run ops/record_kernel_contracts.py on a machine with the new wheel"
        )
    assert pins(line.extra) == {line.distribution: line.version, FLASHINFER: FLASHINFER_VERSION}


@pytest.mark.parametrize(("line", "call"), CALLS)
def test_every_call_of_the_table_binds(line: str, call: Call) -> None:
    if call.path.startswith("torch.ops.sgl_kernel."):
        name = call.path.rpartition(".")[2]
        assert call.arguments == operator_parameters(load_record(line).schemas[name])
    else:
        record_of(call.path, line).bind(call.path, **dict.fromkeys(call.arguments))


@pytest.mark.parametrize("line", ["sglang-kernel", "sgl-kernel"])
def test_functions_stand_before_registered_operators(line: str) -> None:
    """0.4.10 keeps Python functions with no operator behind them; the table must not name one for that line."""
    record = load_record(line)
    gone = {"build_tree_kernel_efficient", "verify_tree_greedy", "segment_packbits"} - set(record.schemas)
    named = {
        call.path.rpartition(".")[2]
        for operation in TABLE.values()
        for provider in operation.providers
        if line in provider.lines
        for call in provider.calls
    }
    assert not gone & named
    assert (line == "sgl-kernel") is not bool(gone)


def test_a_wrong_call_would_be_found() -> None:
    with pytest.raises(ContractError, match="unexpected keyword argument 'epsilon'"):
        record_of("flashinfer.norm.rmsnorm").bind("flashinfer.norm.rmsnorm", input=0, weight=0, epsilon=0)
    schema = load_record("sglang-kernel").schemas["rmsnorm"]
    assert operator_parameters(schema) == ("output", "input", "weight", "eps", "enable_pdl")


def test_wheels_are_imported_under_the_cuda_adapters_only() -> None:
    importing = re.compile(r"^\s*(?:import|from)\s+(?:sgl_kernel|flashinfer)\b", re.MULTILINE)
    roots = [ROOT / name for name in ("adapters", "sglang_lite", "transfer")]
    files = {path for root in roots for path in root.rglob("*.py")}
    assert files
    cuda = ROOT / "adapters" / "cuda"
    wrong = [path for path in files if cuda not in path.resolve().parents and importing.search(path.read_text("utf-8"))]
    assert not wrong
