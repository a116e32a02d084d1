"""The installed wheels against the committed records: what the adapters call has the recorded parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from ops.record_kernel_contracts import SGL_KERNEL_LINES, record_flashinfer, record_sgl_kernel
from sglang_lite.adapters.dispatch import TABLE
from sglang_lite.adapters.kernel_lines import FLASHINFER, metadata_version
from tests.support.kernel_records import KernelRecord, load_record, operator_parameters

pytestmark = pytest.mark.gpu


def called(root: str, line: str) -> set[str]:
    """Paths that the dispatch table names under a package."""
    return {
        call.path
        for operation in TABLE.values()
        for provider in operation.providers
        if line in provider.lines
        for call in provider.calls
        if call.path.startswith(f"{root}.")
    }


def differences(
    record: KernelRecord, document: dict[str, Any], paths: Iterable[str]
) -> dict[str, tuple[list[str], Any]]:
    """Path -> parameters now and in the record, where they differ."""
    found = {}
    for path in paths:
        recorded = list(record.signature(path).parameters)
        owner, _, method = path.rpartition(".")
        owner = record.aliases.get(owner, owner)
        if owner in record.classes:
            entry = document["classes"].get(owner, {}).get("methods", {}).get(method)
        else:
            entry = document["functions"].get(record.defining_path(path))
        now = (
            None
            if entry is None
            else [parameter["name"] for parameter in entry["params"] if parameter["name"] != "self"]
        )
        if now != recorded:
            found[path] = (recorded, now)
    return found


def installed_line() -> str:
    return next(line for line in SGL_KERNEL_LINES if metadata_version(line) is not None)


def test_flashinfer() -> None:
    assert differences(load_record(FLASHINFER), record_flashinfer(), called("flashinfer", installed_line())) == {}


def test_kernel_wheel() -> None:
    line = installed_line()
    record = load_record(line)
    signatures, schemas = record_sgl_kernel(line)
    assert differences(record, {"classes": {}, **signatures}, called("sgl_kernel", line)) == {}
    operators = {path.rpartition(".")[2] for path in called("torch.ops.sgl_kernel", line)}
    assert operators
    now = {name: operator_parameters(schemas["ops"][name]["schema"]) for name in operators}
    assert now == {name: operator_parameters(record.schemas[name]) for name in operators}
